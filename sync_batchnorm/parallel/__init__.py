"""The four steps of a `torch.nn.DataParallel` for any devices: scatter, replicate, apply, gather."""

__all__: list[str] = []
