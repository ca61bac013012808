"""The lab on its hosts, once their engines were asked what they can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from labctl import device_requests, limits
from labctl.context import Context
from labctl.engines import Daemon
from labctl.errors import on_host
from labctl.hardware import HERE, Host
from labctl.model import Lab
from labctl.side_by_side import attempt
from labctl.site import Site

T = TypeVar("T")


def load_lab(context: Context, where: Site, *, ask: bool = True, anew: bool = False) -> tuple[Lab, Site]:
    """The lab that the settings describe, on its hosts as they are; and the site less those that cannot be part of it.

    Their engines are asked what they can do, side by side, unless what was found out before is to count; what an
    earlier trial said of devices is tried ``anew`` for doctor.
    """
    where = where.equipped()
    hosts = {host.name: device_requests.remembered(host, where.directory) for host in where.hosts}
    if ask:
        settled, where = of_engines(where, partial(settled_on, where, anew=anew))
        hosts |= settled
        refused, where = of_engines(where, partial(limits_refused, where))
        for name, those in refused.items():
            if those:
                who = "this host" if name == HERE else name
                context.warn(f"{who} cannot raise {', '.join(those)} for a container: its own limit stays in force")
    lab = lab_on(where, tuple(hosts.values()))
    if ask and limits.lacks_files(lab):
        _, where = of_engines(where, lambda host, engine: limits.ask_files(lab, host.name, engine))
    return limits.with_files(lab), where


def foresee_lab(where: Site) -> tuple[Lab, Site]:
    """The lab as `up` would make it, as far as can be told without a trial, and the site as ``load_lab``.

    No engine need answer.
    """
    where = where.equipped()
    hosts = where.hosts
    if where.accelerator == "nvidia":
        foreseen, _ = attempt(partial(foreseen_on, where), {host.name: host for host in hosts})
        hosts = tuple(foreseen.values())
    return limits.with_files(lab_on(where, hosts)), where


def lab_on(where: Site, hosts: tuple[Host, ...]) -> Lab:
    """The lab on these hosts, with the limits that they are known to grant."""
    return where.lab(hosts, limits.granted(where.settings, where.directory, [host.name for host in hosts]))


def settled_on(where: Site, host: Host, engine: Daemon, *, anew: bool) -> Host:
    found, texts = where.settings, where.texts(host)
    return device_requests.settled(
        found, where.accelerator, host, where.directory, where.image, engine, anew=anew, texts=texts
    )


def foreseen_on(where: Site, host: Host) -> Host:
    engine, texts = where.daemon(host), where.texts(host)
    request, _ = device_requests.foreseen(where.settings, host, where.directory, engine, texts)
    return replace(host, request=request)


def limits_refused(where: Site, host: Host, engine: Daemon) -> tuple[str, ...]:
    return limits.probe(where.settings, where.directory, where.image, host.name, engine)


def of_engines(where: Site, ask: Callable[[Host, Daemon], T]) -> tuple[dict[str, T], Site]:
    """What comes of asking all engines side by side, by host; and the site less those where that failed."""

    def work(host: Host) -> T:
        with on_host(host.name):
            return ask(host, where.engine.on(host.name))

    done, failed = attempt(work, {host.name: host for host in where.hosts if where.daemon(host)})
    return done, where.without(failed)
