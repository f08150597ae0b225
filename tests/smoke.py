"""The smoke suite, `pytest -m smoke`: every promise of the library once, for a person who thinks meanwhile.

Of each of these tests, the first quick case has the mark `smoke`.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

__all__ = ["PROMISES", "mark_smoke"]

PROMISES = {
    # numbers are those of one device
    "layers/test_parity.py": ["test_step_is_that_of_the_whole_batch", "test_empty_replicas_take_part"],
    "layers/test_precision.py": ["test_step_is_as_exact_as_that_of_one_device"],
    "layers/test_second_order.py": ["test_gradient_penalty_is_that_of_one_device"],
    "layers/test_checkpoint.py": ["test_checkpointed_step_is_exact_and_counted_as_on_one_device"],
    "layers/test_training.py": ["test_autocast_around_the_wrapper_is_autocast_around_the_net"],
    "layers/test_parity_calls.py": ["test_one_layer_called_three_times_keeps_its_calls_apart"],
    "layers/test_groups.py": ["test_each_group_is_one_device_for_its_rows"],
    "layers/test_resume.py": ["test_run_that_is_resumed_after_an_unusual_batch_is_the_uninterrupted_one"],
    "layers/test_moments.py": ["test_moments_build_a_normalization_of_ones_own"],
    "processes/test_distributed.py": ["test_check_holds_in_a_world_of_processes"],
    # layers are those of torch, and cost no more
    "layers/test_batchnorm.py": ["test_layers_are_those_of_torch", "test_eval_is_that_of_torch_and_meets_nobody"],
    "layers/test_costs.py": ["test_layer_saves_no_more_bytes_than_that_of_torch"],
    "conversion/test_pickles.py": ["test_checkpoints_go_both_ways", "test_copies_train_on_by_themselves"],
    "conversion/test_convert.py": [
        "test_nothing_but_classes_and_options_differs_after_conversion_and_back",
        "test_layers_that_cannot_be_converted_are_left_as_they_are_and_named",
        "test_layers_built_inside_of_the_context_are_synchronized",
    ],
    # a wrapper is one device: arguments, outputs, and what forward does
    "replicas/test_data_parallel.py": ["test_every_replica_gets_its_part_of_the_arguments"],
    "replicas/test_trees.py": ["test_trees_of_every_kind_are_cut_and_put_together"],
    "replicas/test_dims.py": ["test_program_equals_one_device_in_three_steps"],
    "replicas/test_scatter_gather.py": ["test_replicas_that_return_unlike_outputs_are_named"],
    "replicas/test_arguments.py": ["test_list_that_certainly_has_an_entry_for_each_sample_is_named_once"],
    "replicas/test_own_parameters.py": ["test_penalty_is_right_in_every_wrapper"],
    "replicas/test_hooks.py": ["test_hook_that_a_replica_registers_acts_as_on_one_device_and_ends_with_it"],
    "replicas/test_context.py": ["test_replicas_see_the_variables_of_their_caller_and_set_their_own"],
    "replicas/test_lost_state.py": ["test_numbers_strings_and_buffers_that_a_replica_loses_are_named_once"],
    "replicas/test_turns.py": [
        "test_one_seed_gives_one_result",
        "test_one_replica_runs_at_a_time_the_lowest_that_can_first",
    ],
    "replicas/test_replicate.py": [
        "test_callbacks_run_on_every_copy_and_share_a_context_with_their_copies",
        "test_patched_wrapper_and_its_copies_synchronize_whatever_the_class_defines",
    ],
    "replicas/test_wrapper.py": ["test_buffers_of_the_wrapped_module_change_in_place_and_once"],
    # nothing hangs, and every failure says who and why
    "exchange/test_pipes.py": ["test_each_gets_its_own_result_and_the_master_sees_all_in_order_of_registration"],
    "exchange/test_failures.py": [
        "test_exception_of_a_replica_reaches_the_caller_as_itself",
        "test_replicas_that_diverge_are_named_with_their_layers",
        "test_replicas_that_disagree_are_told_what_they_have",
        "test_replica_that_is_stuck_is_named_with_its_stack_and_not_waited_for",
    ],
    "exchange/test_aftermath.py": ["test_steps_leave_nothing_behind"],
    # training that does not synchronize is told
    "conversion/test_assert_synchronized.py": [
        "test_layers_that_would_not_synchronize_are_named_with_the_reason",
        "test_stock_wrapper_warns_with_the_fix_once",
    ],
    "conversion/test_recording.py": ["test_a_model_that_is_right_passes", "test_nothing_is_left_behind"],
    "conversion/test_planted.py": ["test_a_planted_fault_is_named_and_nothing_else"],
    # older code runs, and the pages say what is so
    "conversion/test_import_lines.py": ["test_modules_give_all_that_those_of_the_older_library_list"],
    "conversion/test_older_code.py": ["test_model_trains_in_every_wrapper_as_on_one_device"],
    "pages/test_docs.py": ["test_python_blocks_of_a_page_run", "test_reference_is_what_the_docstrings_say"],
    "project/test_main.py": ["test_report_of_this_machine_is_all_right"],
    "project/test_layout.py": ["test_documented_table_has_every_file_behind_those_that_it_imports"],
}


def mark_smoke(items: Iterable[pytest.Item]) -> None:
    """Mark the first quick case of each test."""
    marked = set()
    for item in items:
        file, name = "/".join(item.path.parts[-2:]), getattr(item, "originalname", "")
        if name in PROMISES.get(file, []) and name not in marked and not item.get_closest_marker("slow"):
            marked.add(name)
            item.add_marker(pytest.mark.smoke)
