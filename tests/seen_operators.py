"""A mode of PyTorch that notes which operators it sees."""

from torch.utils._python_dispatch import TorchDispatchMode


class Seen(TorchDispatchMode):
    """While it is on, names of operators are added to ``names``."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **kwargs or {})
