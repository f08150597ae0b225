"""Write the reference, `docs/api.md`, from the docstrings of the public names: ``python docs/make_api.py``.

The docstrings are the only source. They are in Google style, with single or double backquotes for code; a name of this
library becomes a link to its section, and ``"Devices" on the page "Usage"`` a link to that heading. What a reader would
miss ends in a `ValueError`: an argument without a line, a line without an argument, a heading that no page has.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sync_batchnorm

__all__ = ["main", "reference"]

DOCS = Path(__file__).parent
PAGE = DOCS / "api.md"
WIDTH = 120
GROUPS = {
    "Convert and wrap": [
        *("convert_model", "revert_model", "patch_sync_batchnorm"),
        *("DataParallelWithCallback", "patch_replication_callback"),
    ],
    "Check": ["assert_synchronized", "assert_matches_one_device"],
    "Layers": [
        *("SynchronizedBatchNorm", "SynchronizedBatchNorm1d", "SynchronizedBatchNorm2d", "SynchronizedBatchNorm3d"),
        "set_sbn_eps_mode",
    ],
    "Exchange of your own": [
        *("SyncMaster", "SlavePipe", "CallbackContext", "execute_replication_callbacks"),
        *("sync_moments", "merge_messages"),
    ],
    "Errors": ["ReplicaSyncError"],
}
# Users get a pipe from another object; the layers have the arguments of `SynchronizedBatchNorm`.
WITHOUT_SIGNATURE = ("SlavePipe", *(f"SynchronizedBatchNorm{n}d" for n in (1, 2, 3)))
METHODS = {"SyncMaster": ["register_slave", "run_master", "nr_slaves"], "SlavePipe": ["run_slave"]}
SECTIONS = ("Example", "Args", "Shape", "Returns", "Raises", "Warns")
INTRODUCTION = """\
# Reference

All public names of `sync_batchnorm`, except those kept for [older code](migrating.md#from-a-copied-folder). Everything
else may change without notice. In shapes, `N` counts samples, `C` channels, and `+` stands for further dimensions.

Examples begin with:

```python
import torch
from torch import nn

from sync_batchnorm import *
```
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(reference(), encoding="utf-8")


def reference() -> str:
    """Return the text of the page."""
    names = [name for group in GROUPS.values() for name in group]
    if sorted(names) != sorted(sync_batchnorm.__all__):
        raise ValueError(f"expected each public name once in GROUPS, but got {names} for {sync_batchnorm.__all__}")
    parts = [INTRODUCTION]
    for heading, group in GROUPS.items():
        parts += [f"## {heading}\n", *(section_of(name) for name in group)]
    return "\n".join(parts)


def section_of(name: str) -> str:
    """Return the section of one public name: its signature, its docstring, and its methods."""
    documented = getattr(sync_batchnorm, name)
    parts = [f"### `{name}`", *described(name, documented)]
    for method in METHODS.get(name, ()):
        parts += [f"#### `{name}.{method}`", *described(f"{name}.{method}", getattr(documented, method))]
    return "\n\n".join(parts) + "\n"


def described(name: str, documented: Any) -> Iterator[str]:
    """Yield the blocks of one signature and docstring."""
    parameters = parameters_of(name, documented)
    if parameters is not None and name not in WITHOUT_SIGNATURE:
        yield f"```text\n{signature_of(name, parameters)}\n```"
    text = inspect.cleandoc(documented.__doc__ or "")
    pieces = re.split(rf"^({'|'.join(SECTIONS)}):\n", text, flags=re.MULTILINE)
    for paragraph in pieces[0].strip().split("\n\n"):
        yield prose(paragraph, name)
    for section, body in zip(pieces[1::2], pieces[2::2], strict=True):
        body = textwrap.dedent(body).strip()
        if section == "Example":
            yield f"```python\n{example(body)}\n```"
            continue
        if section == "Returns":
            yield prose(f"**Returns** {body}", name)
            continue
        items = dict(items_of(body, name))
        if section == "Args":
            check_arguments(name, items, parameters or [])
        yield f"**{'Arguments' if section == 'Args' else section}**"
        yield "\n".join(prose(f"- {title}: {item}", name, "  ") for title, item in items.items())


def parameters_of(name: str, documented: Any) -> list[inspect.Parameter] | None:
    """Return the parameters without annotations; None for a property."""
    if isinstance(documented, property):
        return None
    if isinstance(documented, type) and issubclass(documented, BaseException):
        return [inspect.Parameter("message", inspect.Parameter.POSITIONAL_OR_KEYWORD)]  # One in C has no signature.
    found = [p.replace(annotation=p.empty) for p in inspect.signature(documented).parameters.values()]
    return found[1:] if "." in name else found


def signature_of(name: str, parameters: list[inspect.Parameter]) -> str:
    """Return how a name is called, in lines that a page can show."""
    text = f"{name}{inspect.Signature(parameters)}"
    return "\n".join(textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False))


def check_arguments(name: str, items: dict[str, str], parameters: list[inspect.Parameter]) -> None:
    """Raise an error unless the lines on arguments are about those of the signature."""
    listed = re.findall(r"\w+", " ".join(items))
    if sorted(listed) != sorted(parameter.name for parameter in parameters):
        raise ValueError(f"expected a line for each of {parameters} of {name}, but got {listed}")


def items_of(body: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield the titles and texts of a list, as of arguments: a text may go on in lines that are indented."""
    for item in re.split(r"\n(?! )", body):
        title, colon, text = item.removeprefix("- ").partition(":")
        if not colon:
            raise ValueError(f"expected 'name: text' in the docstring of {name}, but got {item!r}")
        yield ", ".join(f"`{part}`" for part in title.split(", ")), " ".join(text.split())


def example(body: str) -> str:
    """Return the statements of a doctest, with what they print in comments."""
    lines = []
    for line in body.splitlines():
        lines.append(line[4:] if line.startswith((">>> ", "... ")) else f"# {line}")
    return "\n".join(lines)


def prose(text: str, name: str, indent: str = "") -> str:
    """Return a paragraph of a docstring in Markdown, with links."""
    text = " ".join(text.split()).replace("``", "`")
    text = re.sub(r'"([^"]+)" on the page "([^"]+)"', link_to_heading, text)
    text = re.sub(r'the page "([^"]+)"', lambda found: f"[{found[1]}]({file_of(found[1])})", text)
    seen = {name.partition(".")[0]}

    def link(code: re.Match[str]) -> str:
        first = code[1].partition(".")[0]
        if first not in sync_batchnorm.__all__ or first in seen:
            return code[0]
        seen.add(first)
        is_method = code[1].partition(".")[2] in METHODS.get(first, ())
        return f"[{code[0]}](#{(code[1] if is_method else first).replace('.', '').lower()})"

    text = re.sub(r"(?<!\[)`([\w.]+)`", link, text)
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def link_to_heading(found: re.Match[str]) -> str:
    heading, page = found[1], file_of(found[2])
    if not re.search(rf"^#+ {re.escape(heading)}$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE):
        raise ValueError(f"expected a heading {heading!r} in docs/{page}, which a docstring names")
    slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    return f"[{heading}]({page}#{slug})"


def file_of(title: str) -> str:
    """Return the name of the page with that title."""
    for page in sorted(DOCS.glob("*.md")):
        if page.read_text(encoding="utf-8").startswith(f"# {title}\n"):
            return page.name
    raise ValueError(f"expected a page with the title {title!r}, which a docstring names")


if __name__ == "__main__":
    main()
