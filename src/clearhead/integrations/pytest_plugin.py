"""`pytest --clearhead-model SPEC`: every audit of a model as a test, without a line of code.

pytest imports this file in every run, so it imports nothing but pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest

__all__ = ["AuditItem", "AuditedModel", "assert_causal"]

QUESTIONS = {
    "causality": "no output reads what --clearhead-allowed forbids",
    "padding": "padding changes nothing that is real",
    "batch": "the samples of a batch do not see each other",
    "documents": "packed documents do not see each other",
    "generation": "cached decoding gives what one pass gives",
    "modes": "train, eval and backends give the same outputs",
}
MARKER = "clearhead"
# How a spec begins that names a class of a library, and the options that are not for it.
CLASS = "class:"
OF_MODELS = {"allowed": "causal", "documents": None, "length": 24}
# The exit code of `clearhead audit` where nothing could be tested.
NOT_AUDITED = 3
_NOT_AUDITED = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("clearhead", "audits of models that compute attention")
    group.addoption(
        "--clearhead-model",
        action="append",
        default=[],
        metavar="SPEC",
        help="add the audits of a model as tests: package.module:factory, which gives a model or "
        "(model, inputs); hf:DIRECTORY_OR_ID; hf-tiny:DIRECTORY_OR_ID, shrunk to two layers of "
        "random weights; class:NAME, tiny random copies of a class of transformers, or of another "
        "library by class:LIBRARY:NAME; or what `clearhead audit` takes. May be given more "
        "than once",
    )
    group.addoption(
        "--clearhead-allowed",
        default="causal",
        metavar="EXPR",
        help='who may see whom in the causality test, as a mask: "causal & window(4)" (causal)',
    )
    group.addoption(
        "--clearhead-documents",
        metavar="IDS",
        help="packed documents, a number a position: 0,0,0,1,1 (default: three of them, where the "
        "model takes position_ids)",
    )
    group.addoption(
        "--clearhead-length",
        type=int,
        default=24,
        metavar="N",
        help="the number of random tokens, for a model that comes without inputs (24)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker of the audits."""
    config.addinivalue_line("markers", f"{MARKER}: the audits that --clearhead-model adds")


@pytest.fixture
def assert_causal() -> Callable[..., None]:
    """Give `clearhead.assert_causal(model, inputs, **options)`."""
    from clearhead.dependence import assert_causal

    return assert_causal


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Collect the models beside the files."""
    report = yield
    if isinstance(collector, pytest.Session) and report.passed:
        for spec in dict.fromkeys(_option(collector, "model")):
            name = f"{MARKER}[{spec}]"
            report.result.append(
                AuditedModel.from_parent(collector, name=name, nodeid=name, spec=spec)
            )
    return report


def _option(node: pytest.Item | pytest.Collector, name: str) -> Any:
    return node.config.getoption(f"--clearhead-{name}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Do not let a run pass in which a model was not audited at all."""
    # What was collected is missing after a usage error.
    ran = [x for x in getattr(session, "items", ()) if isinstance(x, AuditItem) and x.result]
    names = {x.model.name for x in ran} - {x.model.name for x in ran if x.result != "skipped"}
    session.config.stash[_NOT_AUDITED] = sorted(names)
    if names and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = NOT_AUDITED
    errors = sum(x.result == "error" for x in ran)
    if errors == session.testsfailed > 0 and session.exitstatus == pytest.ExitCode.TESTS_FAILED:
        session.exitstatus = pytest.ExitCode.USAGE_ERROR  # no model could be loaded, nothing failed


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Name the models that were not audited at all."""
    for name in config.stash.get(_NOT_AUDITED, ()):
        terminalreporter.write_line(f"{name}: nothing was audited", red=True)


class AuditedModel(pytest.Collector):
    """One model, loaded when its first test runs."""

    def __init__(self, spec: str, **node: Any) -> None:
        super().__init__(**node)
        self.spec = spec
        self._opened: Any = None

    def collect(self) -> list[AuditItem]:
        """Make one test for each question."""
        return [AuditItem.from_parent(self, name=name) for name in QUESTIONS]

    @property
    def opened(self) -> tuple[Any, Any]:
        """The model and its inputs; an error is raised again for each test."""
        from clearhead.integrations.audits import open_model

        return self._once(lambda: open_model(self.spec, _option(self, "length")))

    @property
    def class_name(self) -> str:
        """The class whose tiny copies are audited, or nothing."""
        return self.spec.removeprefix(CLASS) if self.spec.startswith(CLASS) else ""

    @property
    def rows(self) -> Any:
        """What the audits of the class found, of all questions that are asked in this run."""
        from clearhead.integrations.audits import audit_class

        asked = [one for one in self.session.items if one.parent is self]
        return self._once(lambda: audit_class(self.class_name, [one.name for one in asked]))

    def _once(self, make: Callable[[], Any]) -> Any:
        if self._opened is None:
            try:
                self._opened = make()
            except Exception as error:
                self._opened = error
        if isinstance(self._opened, Exception):
            raise self._opened
        return self._opened


class AuditItem(pytest.Item):
    """One question about a model."""

    def __init__(self, **node: Any) -> None:
        super().__init__(**node)
        self.add_marker(MARKER)
        self.result = ""

    @property
    def model(self) -> AuditedModel:
        """The model that the question is about."""
        assert isinstance(self.parent, AuditedModel)
        return self.parent

    def setup(self) -> None:
        """Load the model: one that cannot be loaded is an error, and no finding."""
        from clearhead._core import is_refusal

        if self.model.class_name:
            return
        self.result = "error"
        try:
            _ = self.model.opened
        except Exception as error:
            if is_refusal(error):
                pytest.fail(str(error), pytrace=False)
            raise

    def runtest(self) -> None:
        """Audit: a finding or an incomplete audit fails; what does not apply is skipped."""
        self.result = "failed"
        if self.model.class_name:
            self._run_class()
        else:
            self._run_model()

    def _run_class(self) -> None:
        from clearhead._core import value_error
        from clearhead.integrations.audits import answer_of

        for name, default in OF_MODELS.items():
            if (got := _option(self, name)) != default:
                rule = f"has no use for {self.model.spec}, which comes with inputs of its own"
                raise value_error(f"--clearhead-{name}", rule, got=repr(got))
        result, reason = answer_of(self.name, self.model.rows)
        if result == "failed":
            raise AuditFailure(reason)
        self.result = result
        if result == "skipped":
            pytest.skip(reason)

    def _run_model(self) -> None:
        from clearhead.integrations.audits import ask

        model, inputs = self.model.opened
        options = _option(self, "allowed"), _option(self, "documents")
        report, reason = ask(self.name, model, inputs, *options)
        if report is None:
            self.result = "skipped"
            pytest.skip(reason)
        if not report.ok:
            raise AuditFailure(str(report).replace("--allowed", "--clearhead-allowed"))
        self.result = "passed"

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """Show a report or a refusal as it is, and any other error with its traceback."""
        from clearhead._core import is_refusal

        if isinstance(excinfo.value, AuditFailure) or is_refusal(excinfo.value):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, None, str]:
        """Name the test by its model and its question."""
        return self.path, None, f"{self.model.name}::{self.name}"


class AuditFailure(AssertionError):
    """A finding, or an audit that could not test everything."""
