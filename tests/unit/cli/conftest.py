from support.commandline import labctl

__all__ = ["labctl"]
