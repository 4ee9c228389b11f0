"""The migrations make exactly the tables that the code declares, on both databases."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from foreshock_service.platform.database.engine import make_engine
from foreshock_service.platform.database.packing import pack
from foreshock_service.platform.database.schema import MIGRATIONS, current_revision, newest_revision, upgrade
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import Alert, Base, StepLint, measurements
from foreshock_service.replay.attribution.conclusions import causes_of_run
from foreshock_service.runs.lint.service import findings_of_run

_MIGRATIONS = str(MIGRATIONS)
# The release before the measures of statistics version 2.
_BEFORE = "0003"


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database that is not migrated yet."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'old.db'}"
    url: str = request.getfixturevalue("postgres").new_database()
    return url


LOW_PROBABILITY = ("low_probability_abs_d", "low_probability_tokens")

OLD_ROWS: dict[str, dict[str, object]] = {
    "runs": {
        "id": "run_1", "project": "default", "key": "a run", "state": "running", "advice_mode": "shadow",
        "created_at_us": 1, "updated_at_us": 2,
    },
    "attempts": {
        "run_id": "run_1", "attempt": 1, "key": "first", "resume_step": 0, "fingerprint": "{}", "created_at_us": 3,
    },
    "measurements": {
        "run_id": "run_1", "attempt": 1, "step": 7, "comparison": "trainer/rollout", "k3_kl": 1e-4,
        "tail_asymmetry_1": -2e-5, "tokens": 1000.0, "from_sample": False, "computed_at_us": 4,
    },
    "measurement_statistics": {
        "run_id": "run_1", "attempt": 1, "step": 7, "comparison": "trainer/rollout", "statistics_version": 1,
        "statistics": b"\x00FSST\xff",
    },
}  # fmt: skip


@contextmanager
def connected(url: str) -> Iterator[sa.Connection]:
    """A transaction on the database."""
    engine = make_engine(url)
    try:
        with engine.begin() as connection:
            yield connection
    finally:
        engine.dispose()


def migrate(url: str, revision: str, *, down: bool = False) -> None:
    """Bring a database to a revision."""
    configuration = Config()
    configuration.set_main_option("script_location", _MIGRATIONS)
    with connected(url) as connection:
        configuration.attributes["connection"] = connection
        (command.downgrade if down else command.upgrade)(configuration, revision)


def rows_of(url: str, table: str) -> list[dict[str, object]]:
    """Return every row of a table."""
    with connected(url) as connection:
        return [dict(row) for row in connection.execute(sa.text(f"SELECT * FROM {table}")).mappings()]


def fill_old(url: str) -> None:
    """Store a run with a measured step, as the release before stored it."""
    with connected(url) as connection:
        for table, row in OLD_ROWS.items():
            columns, values = ", ".join(row), ", ".join(f":{name}" for name in row)
            connection.execute(sa.text(f"INSERT INTO {table} ({columns}) VALUES ({values})"), row)


def test_a_migrated_database_has_exactly_the_declared_tables(database_url: str) -> None:
    engine = make_engine(database_url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
        assert current_revision(connection) == newest_revision()
    engine.dispose()


def test_migrating_again_changes_nothing(database_url: str) -> None:
    upgrade(database_url)
    database = Database(database_url)
    with database.read() as session:
        assert current_revision(session.connection()) == newest_revision()
    database.close()


def test_missing_folder_of_the_database_is_created(tmp_path: Path) -> None:
    upgrade(f"sqlite:///{tmp_path}/not/there/foreshock.db")
    assert (tmp_path / "not/there/foreshock.db").exists()


def test_upgrade_keeps_stored_values_and_new_measures_are_null(empty_database: str) -> None:
    migrate(empty_database, _BEFORE)
    fill_old(empty_database)
    before = {table: rows_of(empty_database, table) for table in OLD_ROWS}
    upgrade(empty_database)
    after = {table: rows_of(empty_database, table) for table in OLD_ROWS}
    (old,), (new,) = before.pop("measurements"), after.pop("measurements")
    (old_run,), (new_run,) = before.pop("runs"), after.pop("runs")
    assert after == before
    later = (
        "declared_model_kind",
        "derived_model_kind",
        "seen_at_us",
        "last_shard_at_us",
        "retention",
        "scalar_names",
        "rules_version",
    )
    assert new_run == {
        **old_run,
        **dict.fromkeys([*later, "rows_removed_at_us"]),
        "deletions": 0,
        "rollouts": 0,
        "tokens": 0,
    }
    assert {name: new[name] for name in old} == old
    assert new["k3_kl"] == 1e-4
    added = set(new) - set(old)
    assert {"pareto_k", "tail_asymmetry_ln2", "k3_kl_bootstrap_low", *LOW_PROBABILITY} <= added
    assert {new[name] for name in added} == {None}
    assert set(new) == set(measurements.c.keys())


def test_downgrade_restores_the_rows_of_the_release_before(empty_database: str) -> None:
    migrate(empty_database, _BEFORE)
    fill_old(empty_database)
    before = {table: rows_of(empty_database, table) for table in OLD_ROWS}
    upgrade(empty_database)
    migrate(empty_database, _BEFORE, down=True)
    assert {table: rows_of(empty_database, table) for table in OLD_ROWS} == before


def test_measures_of_low_probability_come_and_go_in_place(empty_database: str) -> None:
    migrate(empty_database, "0035")
    fill_old(empty_database)
    (before,) = rows_of(empty_database, "measurements")
    migrate(empty_database, "0036")
    assert rows_of(empty_database, "measurements") == [{**before, **dict.fromkeys(LOW_PROBABILITY)}]
    with connected(empty_database) as connection:
        connection.execute(sa.text("UPDATE measurements SET low_probability_abs_d = 0.02, low_probability_tokens = 11"))
    migrate(empty_database, "0035", down=True)
    assert rows_of(empty_database, "measurements") == [before]


OLD_SEVERITIES: dict[str, list[dict[str, object]]] = {
    "steps": [
        {
            "run_id": "run_1", "attempt": 1, "step": step, "expected_shards": 1, "received_shards": 1, "rollouts": 8,
            "tokens": 80, "first_shard_at_us": 1, "last_shard_at_us": 1, "closed_at_us": 2,
        }
        for step in (7, 8, 9)
    ],
    "alerts": [
        {
            "id": f"alert_{rule}", "run_id": "run_1", "attempt": 1, "rule": rule, "step": 7, "severity": severity,
            "value": 0.02, "threshold": 0.01, "why": "why", "what_to_do": "what", "moves_learning_rate": False,
            "evidence": "{}", "state": "acknowledged", "cleared_step": None, "changed_by": "operator", "version": 1,
            "opened_at_us": 1, "changed_at_us": 2,
        }
        for rule, severity in (("mismatch_bad", "bad"), ("mismatch_look", "look"), ("length_ramp", "info"))
    ],
    "step_lint": [
        {
            "run_id": "run_1", "attempt": 1, "step": step, "severity": severity, "warnings": json.dumps(warnings),
            "report": json.dumps({"step": step, "warnings": [
                {"name": name, "severity": of_warning, "title": "what looks bad"}
                for name, of_warning in warnings.items()
            ]}),
            "surprisal_tokens": 0, "surprisal": 0.0, "entropy": 0.0, "surprisal_variance": 0.0,
            "largest_surprisal": 0.0,
        }
        for step, severity, warnings in (
            (7, "bad", {"shifted_log_probs": "bad", "pad_id_sampled": "look"}),
            (8, "look", {"pad_id_sampled": "look"}),
            (9, None, {}),
        )
    ],
}  # fmt: skip


def fill_old_severities(url: str) -> None:
    """Store alerts and lint verdicts of a run, as the release before stored them."""
    fill_old(url)
    with connected(url) as connection:
        for table, rows in OLD_SEVERITIES.items():
            columns, values = ", ".join(rows[0]), ", ".join(f":{name}" for name in rows[0])
            connection.execute(sa.text(f"INSERT INTO {table} ({columns}) VALUES ({values})"), rows)


def test_stored_severities_and_rule_names_are_renamed(empty_database: str) -> None:
    migrate(empty_database, "0005")
    fill_old_severities(empty_database)
    upgrade(empty_database)
    database = Database(empty_database)
    with database.read() as session:
        alerts = {alert.id: alert for alert in session.scalars(sa.select(Alert))}
        verdicts = {verdict.step: verdict for verdict in session.scalars(sa.select(StepLint))}
    database.close()
    assert {key: (alert.rule, alert.severity, alert.state) for key, alert in alerts.items()} == {
        "alert_mismatch_bad": ("mismatch_critical", "critical", "acknowledged"),
        "alert_mismatch_look": ("mismatch_warning", "warning", "acknowledged"),
        "alert_length_ramp": ("length_ramp", "info", "acknowledged"),
    }
    assert {step: (verdict.severity, verdict.warnings) for step, verdict in verdicts.items()} == {
        7: ("critical", {"shifted_log_probs": "critical", "pad_id_sampled": "warning"}),
        8: ("warning", {"pad_id_sampled": "warning"}),
        9: (None, {}),
    }
    assert verdicts[7].report["warnings"] == [
        {"name": "shifted_log_probs", "severity": "critical", "title": "what looks bad"},
        {"name": "pad_id_sampled", "severity": "warning", "title": "what looks bad"},
    ]
    assert verdicts[9].report == {"step": 9, "warnings": []}


def test_downgrade_restores_the_severities_of_the_release_before(empty_database: str) -> None:
    migrate(empty_database, "0005")
    fill_old_severities(empty_database)
    before = {table: rows_of(empty_database, table) for table in OLD_SEVERITIES}
    upgrade(empty_database)
    migrate(empty_database, "0005", down=True)
    after = {table: rows_of(empty_database, table) for table in OLD_SEVERITIES}
    by_id = {table: sorted(map(repr, _parsed(rows))) for table, rows in after.items()}
    assert by_id == {table: sorted(map(repr, _parsed(rows))) for table, rows in before.items()}


def test_findings_of_stored_verdicts_and_attributions_are_due(empty_database: str) -> None:
    migrate(empty_database, "0005")
    fill_old_severities(empty_database)
    migrate(empty_database, "0036")
    with connected(empty_database) as connection:
        attribution = {"run_id": "run_1", "attempt": 1, "step": 7, "stale": False, "changed_at_us": 1, "computed": 2}
        connection.execute(
            sa.text(
                "INSERT INTO attributions (run_id, attempt, step, stale, changed_at_us, document, computed_at_us) "
                "VALUES (:run_id, :attempt, :step, :stale, :changed_at_us, NULL, :computed)"
            ),
            [attribution, {**attribution, "step": 8}],
        )
    upgrade(empty_database)
    due = rows_of(empty_database, "due_findings")
    assert sorted((row["run_id"], row["source"], row["changes"]) for row in due) == [
        ("run_1", "attribution", 1),
        ("run_1", "lint", 1),
    ]
    assert rows_of(empty_database, "findings") == []
    database = Database(empty_database)
    with database.read() as session:
        found = {each.newest.name: each for each in findings_of_run(session, "run_1")}
        assert causes_of_run(session, "run_1") == []
    database.close()
    assert {name: (each.steps, each.first_step, each.newest_step) for name, each in found.items()} == {
        "shifted_log_probs": (1, 7, 7),
        "pad_id_sampled": (2, 7, 8),
    }
    assert found["pad_id_sampled"].newest.title == "what looks bad"
    migrate(empty_database, "0036", down=True)
    migrate(empty_database, "0037")
    assert len(rows_of(empty_database, "due_findings")) == 2


def test_states_of_detectors_get_an_identity_and_those_that_are_not_stored_go_with_a_downgrade(
    empty_database: str,
) -> None:
    migrate(empty_database, "0005")
    fill_old(empty_database)
    migrate(empty_database, "0037")
    names = "run_id, attempt, step, configuration_digest, milestone, state"
    stored = f"INSERT INTO detector_snapshots ({names}) VALUES ('run_1', 1, :step, 'digest', :milestone, :state)"
    with connected(empty_database) as connection:
        rows = [{"step": step, "milestone": step == 25, "state": pack(b"{}")} for step in (25, 26, 27)]
        connection.execute(sa.text(stored), rows)
    before = rows_of(empty_database, "detector_snapshots")
    migrate(empty_database, "0038")
    after = rows_of(empty_database, "detector_snapshots")
    assert len({row.pop("identity") for row in after}) == 3
    assert after == before
    passing = stored.replace("state)", "state, identity)", 1).replace(":state)", "NULL, 7)")
    with connected(empty_database) as connection:
        connection.execute(sa.text(passing), {"step": 28, "milestone": False})
    migrate(empty_database, "0037", down=True)
    assert rows_of(empty_database, "detector_snapshots") == before
    (due,) = rows_of(empty_database, "due_replays")
    assert (due["run_id"], due["from_step"], due["through_step"]) == ("run_1", 28, 28)


def _parsed(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Parse JSON: SQLite returns JSON columns as text, which Alembic may write with other spaces, in another order."""
    columns = ("warnings", "report", "evidence")
    return [
        {
            name: json.loads(value) if name in columns and isinstance(value, str) else value
            for name, value in sorted(row.items())
        }
        for row in rows
    ]


def test_revisions_are_one_chain() -> None:
    configuration = Config()
    configuration.set_main_option("script_location", _MIGRATIONS)
    scripts = ScriptDirectory.from_config(configuration)
    chain = [script.revision for script in scripts.walk_revisions()]
    assert scripts.get_heads() == [chain[0]]
    assert chain == sorted(chain, reverse=True)
    assert len(chain) == len(list(Path(_MIGRATIONS, "versions").glob("0*.py")))
