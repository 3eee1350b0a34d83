"""Evidence as tables for people: every case, and what decided each gate."""

from pathlib import Path

import typer
from rich.markup import escape

from policies.evidence import Case, Evidence
from policies.gates import Gate, State, Verdict
from policies.measures import METRICS, Unit
from zlab.tables import MISSING, console, figure, milliseconds, plain_table

SHORT = 12  # digits of an id
MOST_WORDS = 60
SHOWN_IN_MS_BELOW_S = 0.1
SHOWN = {State.PASSED: "holds", State.FAILED: "[bold]BROKEN[/]", State.UNMEASURED: "[bold]not measured[/]"}


def show_evidence(evidence: Evidence, out: Path | None, registry: Path | None) -> None:
    """What was judged on what, the cases, the gates, and where the record is."""
    to, setup = console(), evidence.content["setup"]
    limits, against = setup["limits"], evidence.content.get("against")
    beside = f" against [bold]{escape(against['name'])}[/]" if against else ""
    to.print(
        f"[bold]{escape(evidence.policy.name)}[/]{beside} on {evidence.target.gpu} with {evidence.target.model}, "
        f"{limits['num_blocks']:,} blocks of {limits['block_size']} tokens; costs: {setup['cost']['source']}"
    )
    to.print()
    table = plain_table("case", *(gate.metric for gate in evidence.gates.gates))
    for number, case in enumerate(evidence.cases, start=1):
        table.add_row(str(number), *(_cell(gate, case) for gate in evidence.gates.gates))
    to.print(table)
    for number, case in enumerate(evidence.cases, start=1):
        to.print(escape(f"{number}: {case.label}" + (f": {case.error}" if case.error else "")))
    to.print()
    table = plain_table("gate", "worst", "limit", "", "case")
    table.columns[3].justify = "left"
    for one in evidence.judged:
        verdict = one.verdict
        metric = verdict.gate.metric
        table.add_row(
            escape(verdict.gate.written),
            escape(_factor(verdict, one.case) or show_value(metric, verdict.measured)),
            f"{verdict.gate.bound:g}x" if verdict.gate.is_relative else escape(show_value(metric, verdict.limit)),
            SHOWN[verdict.state],
            str(evidence.cases.index(one.case) + 1),
        )
    to.print(table)
    to.print()
    kept = [f"in {where}" for where in (out, registry) if where is not None]
    where = " and ".join(kept) or "kept nowhere: give --out FILE or --registry FILE"
    typer.echo(f"{'PASSED' if evidence.passed else 'FAILED'}: evidence {evidence.id[:SHORT]}, {where}")


def show_value(metric: str, value: float | str | None) -> str:
    """A measurement with its unit."""
    if value is None:
        return MISSING
    if isinstance(value, str):
        return value if len(value) <= MOST_WORDS else value[: MOST_WORDS - 3] + "..."
    unit = METRICS[metric].unit
    if unit is Unit.SHARE:
        return f"{value:.1%}"
    if unit is Unit.SECONDS and 0 < abs(value) < SHOWN_IN_MS_BELOW_S:
        return f"{milliseconds(value)} ms"
    text = f"{value:,.0f}" if value == int(value) and unit is Unit.NUMBER else figure(value)
    return f"{text} {unit}" if unit in (Unit.SECONDS, Unit.PER_SECOND) else text


def _cell(gate: Gate, case: Case) -> str:
    """What a case amounts to for a gate: the measurement, or its factor of the baseline's; marked if it won't do."""
    verdict = gate.judge(case.measured, case.baseline)
    text = escape(_factor(verdict, case) or show_value(gate.metric, verdict.measured))
    return text if verdict.passed else f"[bold]{text} ![/]"


def _factor(verdict: Verdict, case: Case) -> str | None:
    """As `2.31x (3,954 /s)`, where the gate is relative and there is something to divide by."""
    gate, value = verdict.gate, verdict.measured
    under = (case.baseline or {}).get(gate.metric)
    if not gate.is_relative or isinstance(value, str | None) or isinstance(under, str | None) or not under:
        return None
    return f"{value / under:.2f}x ({show_value(gate.metric, value)})"
