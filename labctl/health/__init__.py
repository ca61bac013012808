"""Health of a node: readings, pure checks of them, and comparisons with neighbours and with earlier readings.

``model`` has the nouns. A subject of a host is a module of this package, one of an accelerator is in its own module;
``catalogue`` lists those of hosts. Nothing here reads a host: ``runs.health`` does, by a subject's script.
"""
