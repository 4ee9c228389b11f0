"""The checked-in dashboards are current, and every query in them works on a real database and names real metrics."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from fastapi.routing import APIRoute
from grafana_foundation_sdk.models.dashboard import DataSourceRef

from dashboards.generate import FOLDER, RULES, dashboards, stale_files
from dashboards.layout import GRID_WIDTH
from dashboards.panels import Panel
from dashboards.queries import POSTGRESQL, PROMETHEUS, PromQuery, SqlQuery
from foreshock.diagnosis.lag_zero import at_lag_zero
from foreshock.measures.registry import TOKENS_BY_LAG
from foreshock_service.platform.database.opening import upgrade
from foreshock_service.present.pages.endpoints import pages
from tests.dashboards.filling import filled
from tests.dashboards.metrics import LABELS, METRIC, REASONS, metrics_without_panel
from tests.dashboards.monitored import READER_PASSWORD, make_reader
from tests.paths import REPOSITORY
from tests.service.postgres import PostgresCluster, start_postgres

PROVISIONING = REPOSITORY / "dashboards" / "grafana" / "provisioning"
DASHBOARDS = {dashboard.uid: dashboard.render() for dashboard in dashboards()}


def panels_of(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def targets(datasource: DataSourceRef, key: str) -> list[tuple[str, str]]:
    """(where, query) of every panel that asks this data source."""
    return [
        (f"{uid}: {panel['title']}", target[key])
        for uid, dashboard in DASHBOARDS.items()
        for panel in panels_of(dashboard)
        for target in panel["targets"]
        if target["datasource"] == datasource.to_json()
    ]


def page_paths() -> list[str]:
    return [route.path for route in pages.routes if isinstance(route, APIRoute)]


def query_text(query: str | dict[str, Any]) -> str:
    return query if isinstance(query, str) else str(query["query"])


def variables(datasource: DataSourceRef) -> list[tuple[str, str]]:
    return [
        (f"{uid}: variable {variable['name']}", query_text(variable["query"]))
        for uid, dashboard in DASHBOARDS.items()
        for variable in dashboard["templating"]["list"]
        if variable["datasource"] == datasource.to_json()
    ]


SQL = [*targets(POSTGRESQL, "rawSql"), *variables(POSTGRESQL)]
EXPRESSIONS = targets(PROMETHEUS, "expr")


def test_generated_files_are_current() -> None:
    assert stale_files() == [], "run python -m dashboards.generate"


def test_stale_files_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path in FOLDER.glob("*.json"):
        shutil.copy(path, tmp_path / path.name)
    monkeypatch.setattr("dashboards.generate.FOLDER", tmp_path)
    rules = tmp_path / "rules.yml"
    shutil.copy(RULES, rules)
    monkeypatch.setattr("dashboards.generate.RULES", rules)
    assert stale_files() == []
    rules.write_text(rules.read_text().replace("> 0.01", "> 0.02"))
    assert stale_files() == [rules]
    shutil.copy(RULES, rules)
    changed = tmp_path / "foreshock-run.json"
    changed.write_text(changed.read_text().replace("Response length", "Length"))
    (tmp_path / "forgotten.json").write_text("{}")
    assert {path.name for path in stale_files()} == {"foreshock-run.json", "forgotten.json"}


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_panels_have_their_own_id_and_do_not_overlap(uid: str) -> None:
    panels = DASHBOARDS[uid]["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= GRID_WIDTH, panel["title"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_every_panel_has_a_description_and_a_provisioned_source(uid: str) -> None:
    provisioned = yaml.safe_load((PROVISIONING / "datasources" / "foreshock.yml").read_text())["datasources"]
    sources = {(source["type"], source["uid"]) for source in provisioned}
    for panel in panels_of(DASHBOARDS[uid]):
        assert panel["description"], panel["title"]
        assert panel["targets"], panel["title"]
        assert all((t["datasource"]["type"], t["datasource"]["uid"]) in sources for t in panel["targets"])


def test_panel_with_two_sources_is_refused() -> None:
    mixed = Panel("mixed", "timeseries", (PromQuery("up"), SqlQuery("SELECT 1")), "two sources")
    with pytest.raises(ValueError, match="mixes datasources"):
        mixed.build(1, 0, 0)


def test_provisioning_matches_the_compose_file() -> None:
    compose = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]
    mounts = dict(volume.split(":")[:2] for volume in compose["grafana"]["volumes"])
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "foreshock.yml").read_text())["providers"]
    assert mounts["./dashboards/grafana/json"] == provider["options"]["path"]
    assert mounts["./dashboards/grafana/provisioning"] == "/etc/grafana/provisioning"
    home = Path(compose["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (FOLDER / home.name).is_file()
    assert str(home.parent) == provider["options"]["path"]
    for source in yaml.safe_load((PROVISIONING / "datasources" / "foreshock.yml").read_text())["datasources"]:
        host = source["url"].removeprefix("http://").partition(":")[0]
        assert host in compose, f"{source['name']} is at {host}, which is no service"
        for secret in source.get("secureJsonData", {}).values():
            assert secret.removeprefix("$") in compose["grafana"]["environment"]
    assert "READER_PASSWORD" in compose["grafana-reader"]["environment"]


def test_every_metric_that_a_panel_asks_for_is_exported() -> None:
    for where, expression in [*EXPRESSIONS, *variables(PROMETHEUS)]:
        for name in METRIC.findall(expression):
            assert name in LABELS, f"{where} asks for {name}"


def test_every_metric_has_a_panel_or_a_reason() -> None:
    assert metrics_without_panel() == set(REASONS)


def test_every_label_that_a_legend_names_is_on_its_metric() -> None:
    for dashboard in DASHBOARDS.values():
        for panel in panels_of(dashboard):
            for target in panel["targets"]:
                names = re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", ""))
                metrics = METRIC.findall(target.get("expr", ""))
                # Prometheus adds the labels of its target.
                known = {"instance"}.union(*(LABELS[metric] for metric in metrics))
                assert set(names) <= known, panel["title"]


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_links_lead_to_pages_of_the_service(uid: str) -> None:
    """Every link is that of a route, with a variable, a label or a column where the route has a parameter."""
    routes = {re.sub(r"\{\w+\}", "*", path) for path in page_paths()}
    document = DASHBOARDS[uid]
    links = [link["url"] for link in document["links"] if link["type"] == "link"]
    for panel in panels_of(document):
        links += [link["url"] for link in panel["fieldConfig"]["defaults"].get("links", [])]
    assert links
    for url in links:
        path = url.removeprefix("${foreshock:raw}")
        assert path != url, f"{url} does not begin with the service's address"
        assert re.sub(r"\$\{[\w.:]+\}", "*", path) in routes, url


@pytest.fixture(scope="module")
def cluster() -> Iterator[PostgresCluster]:
    cluster = start_postgres()
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def database_url(cluster: PostgresCluster) -> str:
    """A migrated database with a run that was resumed once, and the reader's role, made twice."""
    url = cluster.new_database()
    upgrade(url)
    for _ in range(2):
        make_reader(url)
    with psycopg.connect(url) as connection:
        connection.execute(
            "INSERT INTO runs (id, project, key, advice_mode, state, last_step, created_at_us, updated_at_us) "
            "VALUES ('run_1', 'default', 'O''Brien', 'shadow', 'running', 3, 1, 1)"
        )
        for attempt, resume_step in ((1, 0), (2, 2)):
            connection.execute(
                "INSERT INTO attempts (run_id, attempt, key, resume_step, fingerprint, created_at_us) "
                "VALUES ('run_1', %s, %s, %s, '{}', 1)",
                (attempt, f"start {attempt}", resume_step),
            )
        # Attempt 1 went to step 3, attempt 2 began again at step 2.
        for attempt, step, k3 in ((1, 1, 1e-5), (1, 2, 5e-1), (1, 3, 5e-1), (2, 2, 2e-5), (2, 3, 3e-5)):
            connection.execute(
                "INSERT INTO measurements (run_id, attempt, step, comparison, k3_kl, k3_kl_low, k3_kl_bootstrap_low, "
                "from_sample, computed_at_us) VALUES ('run_1', %s, %s, 'trainer/rollout', %s, %s, %s, false, 1)",
                (attempt, step, k3, k3 / 2, k3 / 4 if step == 3 else None),
            )
            connection.execute(
                "INSERT INTO scalars (run_id, attempt, step, source, name, value, received_at_us) "
                "VALUES ('run_1', %s, %s, 'trainer', 'grad_norm', %s, 1)",
                (attempt, step, k3),
            )
            connection.execute(
                "INSERT INTO steps (run_id, attempt, step, expected_shards, received_shards, folded_shards, rollouts, "
                "tokens, first_shard_at_us, last_shard_at_us, closed_at_us) "
                "VALUES ('run_1', %s, %s, 2, 1, 1, 4, 40, 1, 1, 2)",
                (attempt, step),
            )
    return url


@pytest.fixture
def reader(database_url: str) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    """A connection with the role that Grafana has."""
    with psycopg.connect(database_url, user="foreshock_reader", password=READER_PASSWORD) as connection:
        yield connection


@pytest.mark.parametrize(("where", "sql"), SQL, ids=[where for where, _ in SQL])
def test_every_sql_query_runs_as_the_reader(reader: psycopg.Connection[tuple[Any, ...]], where: str, sql: str) -> None:
    query = filled(sql)
    assert "$" not in query, "variables are quoted by Grafana (:sqlstring), never pasted in"
    rows = reader.execute(query.encode()).fetchall()
    # Every query on data of real runs: test_live.py.
    if where.startswith("foreshock-run") and "'rollout'" not in sql:
        assert rows, where


def test_trend_shows_active_steps_only(reader: psycopg.Connection[tuple[Any, ...]]) -> None:
    (sql,) = [query for where, query in SQL if where.endswith("k3 per token, every comparison")]
    rows = reader.execute(filled(sql).encode()).fetchall()
    assert [(row[0], row[1]) for row in rows] == [(1, 1e-5), (2, 2e-5), (3, 3e-5)]


@pytest.mark.parametrize("measure", ["k3_kl", "tail_2"])
def test_range_is_drawn_around_what_the_rules_judge(database_url: str, measure: str) -> None:
    """Steps of every mix of lags, of few tokens and without versions."""
    none = dict.fromkeys((each.column for each in TOKENS_BY_LAG), None)
    cases: list[dict[str, float | None]] = [
        none | {"tokens": tokens, "tokens_lag_0": fresh, "tokens_lag_5_8": stale, "k3_kl_lag_0": 1e-4, "lag_mean": mean}
        for tokens, fresh, stale, mean in (
            (400, 100, 300, 6.0), (400, 99, 301, 6.0), (400, None, 400, 8.0), (400, 400, None, 0.0), (90, 90, 0, 0.0),
            (1000, 995, 5, 0.03), (1000, 985, 15, 0.09), (400, None, None, None), (400, None, None, 0.4),
            (400, None, None, 2.0), (20, None, None, None),
        )
    ]  # fmt: skip
    (sql,) = [query for where, query in SQL if f'AS "{measure} at lag 0"' in query]
    wanted: list[float | None] = []
    with psycopg.connect(database_url) as connection:
        connection.execute(
            "INSERT INTO runs (id, project, key, advice_mode, state, created_at_us, updated_at_us) "
            "VALUES ('mixed', 'default', 'mixed', 'shadow', 'running', 1, 1)"
        )
        connection.execute(
            "INSERT INTO attempts (run_id, attempt, key, resume_step, fingerprint, created_at_us) "
            "VALUES ('mixed', 1, 'first', 0, '{}', 1)"
        )
        for step, case in enumerate(cases):
            row = case | {"k3_kl": 0.06, "tail_2": 0.2}
            mean = row.pop("lag_mean")
            for comparison, values in (("rollout", {"lag_mean": mean}), ("trainer/rollout", row)):
                columns = ", ".join(values)
                connection.execute(
                    "INSERT INTO measurements (run_id, attempt, step, comparison, from_sample, computed_at_us, "
                    f"{columns}) VALUES ('mixed', 1, %s, %s, false, 1, {', '.join(['%s'] * len(values))})".encode(),
                    (step, comparison, *values.values()),
                )
            known = {f"trainer/rollout:{name}": value for name, value in row.items()} | {"rollout:lag_mean": mean}
            wanted.append(at_lag_zero(measure, known))
        rows = connection.execute(filled(sql, "mixed").encode()).fetchall()
        connection.rollback()
    assert [row[1] for row in rows] == wanted
    assert None in wanted
    assert len(set(wanted)) > 1


def test_interval_is_of_the_bootstrap_if_available(reader: psycopg.Connection[tuple[Any, ...]]) -> None:
    (sql,) = [query for where, query in SQL if where.endswith("k3 and its range")]
    rows = reader.execute(filled(sql).encode()).fetchall()
    assert [(row[0], row[2]) for row in rows] == [(1, 0.5e-5), (2, 1e-5), (3, 0.75e-5)]


def test_every_trend_has_the_step_on_its_axis(reader: psycopg.Connection[tuple[Any, ...]]) -> None:
    for dashboard in DASHBOARDS.values():
        for panel in panels_of(dashboard):
            if panel["type"] == "trend":
                cursor = reader.execute(filled(panel["targets"][0]["rawSql"]).encode())
                names = [column.name for column in cursor.description or ()]
                assert names[0] == panel["options"]["xField"] == "step", panel["title"]
                assert len(set(names)) == len(names) > 1, panel["title"]


@pytest.mark.parametrize("table", ["api_keys", "shards", "shard_statistics", "measurement_statistics"])
def test_reader_role_cannot_read_keys_or_tokens(reader: psycopg.Connection[tuple[Any, ...]], table: str) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        reader.execute(f"SELECT * FROM {table}".encode())


def test_reader_role_cannot_write(reader: psycopg.Connection[tuple[Any, ...]]) -> None:
    with pytest.raises((psycopg.errors.ReadOnlySqlTransaction, psycopg.errors.InsufficientPrivilege)):
        reader.execute("DELETE FROM measurements")
