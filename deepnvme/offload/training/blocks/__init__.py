"""The blocks of a model in training: parameters, gradients and optimizer states, on the drive, and in memory while in use."""

__all__: list[str] = []
