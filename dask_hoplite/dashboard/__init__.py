"""A page in the scheduler's dashboard, also in one that is being served already.

Without Bokeh, or without a dashboard, there is none, and nothing else changes.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import dask.config
from tornado.ioloop import IOLoop

from dask_hoplite import seams, versions

if TYPE_CHECKING:
    from distributed import Scheduler

logger = logging.getLogger(__name__)

#: The page's path, and its name in the navigation
NAME = "hoplite"


def install(scheduler: Scheduler) -> None:
    """Add the page to a scheduler's dashboard, if there is one.

    Parameters
    ----------
    scheduler : Scheduler
        Its HTTP server may be running.
    """
    if importlib.util.find_spec("bokeh") is None:
        logger.warning("Hoplite: no page in the dashboard, as Bokeh is not installed")
        return
    if reason := versions.check(seams.DASHBOARD, scheduler):
        logger.warning("Hoplite: no page in the dashboard: %s", reason)
        return
    try:
        if not list(_hoplite_pages(scheduler)):
            _mount(scheduler)
        _navigate(scheduler, there=True)
    except Exception as error:  # a page is not worth to do without all else
        logger.warning("Hoplite: no page in the dashboard: %s: %s", type(error).__name__, error)


def uninstall(scheduler: Scheduler) -> None:
    """Take the page out of navigation and lists.

    Who asks for it, or has it open, is told that Hoplite is not installed.
    """
    if list(_hoplite_pages(scheduler)):
        _navigate(scheduler, there=False)


def _hoplite_pages(scheduler: Scheduler) -> Iterator[Any]:
    """The application that serves our pages, if there is one."""
    for application in getattr(scheduler.http_application, "applications", ()):
        if hasattr(application, "hoplite_paths"):
            yield application


def _mount(scheduler: Scheduler) -> None:
    applications = scheduler.http_application.applications
    if not applications:
        return  # the scheduler has no dashboard
    from bokeh.application import Application
    from bokeh.application.handlers.function import FunctionHandler
    from distributed.dashboard.core import DaskBokehTornado

    boards: list[Any] = [app for app in applications if isinstance(app, DaskBokehTornado)]
    if not boards:
        return
    daskboard = boards[0]

    from distributed.dashboard.scheduler import template_variables

    from dask_hoplite.dashboard.page import PARTS, Watch, individual, page

    class Pages(DaskBokehTornado):
        """Our pages, listed as if they were among Dask's.

        Dask lists those of the first Bokeh application for JupyterLab's extension. So this one is
        the first, and names the others' as well, but serves its own only.
        """

        hoplite_paths: frozenset[str] = frozenset()

        @property
        def app_paths(self) -> set[str]:
            installed = NAME in scheduler.extensions
            return daskboard.app_paths | (self.hoplite_paths if installed else set())

        def find_handler(self, request: Any, **kwargs: Any) -> Any:
            path = request.path.removeprefix(self.prefix)
            if any(path == own or path.startswith(f"{own}/") for own in self.hoplite_paths):
                return super().find_handler(request, **kwargs)
            return None

    watch = Watch(scheduler)
    extra = {"prefix": f"{daskboard.prefix}/", **template_variables(scheduler)}
    documents = {f"/{NAME}": partial(page, watch, extra)}
    for name in PARTS:
        documents[f"/individual-{NAME}-{name}"] = partial(individual, name, watch, extra)
    settings = dict(dask.config.get("distributed.scheduler.dashboard.bokeh-application"))
    settings.pop("allow_websocket_origin", None)  # Dask has put them together with its own
    pages = Pages(
        {path: Application(FunctionHandler(fill)) for path, fill in documents.items()},
        prefix=daskboard.prefix,
        use_index=False,
        extra_websocket_origins=daskboard.websocket_origins,
        absolute_url="",
        **settings,
    )
    pages.hoplite_paths = frozenset(documents)
    pages.initialize(IOLoop.current())
    pages.start()
    applications.insert(0, pages)


def _navigate(scheduler: Scheduler, *, there: bool) -> None:
    """Have a link to the page on all of Dask's pages, or have none."""
    if not list(_hoplite_pages(scheduler)):
        return
    from distributed.dashboard.scheduler import template_variables

    # Dask makes these once for each scheduler, and all pages share the list.
    names = template_variables(scheduler)["pages"]
    if there and NAME not in names:
        names.insert(names.index("info") if "info" in names else len(names), NAME)
    elif not there and NAME in names:
        names.remove(NAME)
