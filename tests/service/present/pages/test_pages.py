"""The pages over HTTP: what they show, what they say when there is nothing, and what they refuse."""

import html
import re
from dataclasses import replace
from html.parser import HTMLParser

import httpx
import pytest

from dashboards.run import run_dashboard as dashboard
from foreshock.certify.registry import engine_of, entries
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts.attributes import BatchAttributes
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.security import SESSION_COOKIE, Scope, create_key, new_secret
from foreshock_service.platform.settings import Settings
from foreshock_service.present.pages.presenters.alerts import run_dashboard
from foreshock_service.present.pages.presenters.figures import RUN_PLOTS, STEP_PLOTS
from foreshock_service.present.pages.rendering import number, with_code
from tests.service.present.pages.conftest import SentRun, Site, replay, send_run
from tests.service.sending import make_batch, start_run


def test_empty_service_shows_how_to_start_a_run(http: httpx.Client) -> None:
    page = http.get("/").raise_for_status().text
    assert "No run yet" in page
    assert "foreshock.Client" in page


def test_the_list_shows_runs_with_their_mismatch_and_their_advice(site: Site) -> None:
    page = site.http.get("/").raise_for_status().text
    assert f'href="{site.run.address}"' in page
    assert site.run.name in page
    row = page[page.index(site.run.id) :].partition("</tr>")[0]
    assert re.search(r'data-column="k3"><svg.*?</svg><span>[\d.]+e-5<', row)
    assert re.search(r'data-column="rate"><span class="muted" title="shadow mode: the trainer gets 1.0">1<', row)


def test_run_page_has_its_description_advice_and_every_plot(site: Site) -> None:
    page = site.http.get(site.run.address).raise_for_status().text
    for text in (
        site.run.name,
        "a trainer",
        "1e-4",
        "running",
        "Newest closed step",
        "shadow mode: the trainer gets 1.0",
        "Every logged scalar",
    ):
        assert text in page, text
    addresses = re.findall(r'data-figure="([^"]+)"', page)
    assert addresses == [f"/pages/runs/{site.run.id}/figures/{name}.json" for name in RUN_PLOTS]
    assert "No probe yet" in site.http.get(f"/pages/runs/{site.run.id}/probes").text


def test_the_plotted_mismatch_is_the_measured_one(site: Site) -> None:
    measured = site.http.get(f"/v1/runs/{site.run.id}/measurements", params={"measure": "k3_kl"}).json()["columns"]
    whole = [
        (step, value)
        for step, comparison, value in zip(measured["step"], measured["comparison"], measured["k3_kl"], strict=True)
        if comparison == "trainer/rollout"
    ]
    (trace,) = site.http.get(f"/pages/runs/{site.run.id}/figures/mismatch.json").json()["data"]
    assert list(zip(trace["x"], trace["y"], strict=True)) == whole


def test_page_of_a_replayed_run_has_the_attribution(site: Site) -> None:
    read = site.http.get(f"/v1/runs/{site.replayed.id}/steps/3/attribution").raise_for_status().json()
    figure = site.http.get(f"/pages/runs/{site.replayed.id}/figures/attribution.json").json()
    assert figure["data"][0]["x"] == [link["share"] for link in read["links"]]
    assert "Step 3." in figure["caption"]
    assert "vllm.decode" in figure["caption"], "the caption names the missing score"
    assert " nearer to float32" in figure["caption"]
    page = html.unescape(site.http.get(f"{site.replayed.address}/steps/3").text)
    for link in [*read["links"], read["whole"]]:
        assert f'<td data-column="Cause">{link["cause"]}</td>' in page


def test_probes_are_listed_with_their_state_their_scorers_and_their_worker(site: Site) -> None:
    page = site.http.get(f"/pages/runs/{site.replayed.id}/probes").text
    assert "torch.float32, torch.trainer, vllm.prefill" in page
    assert '<span class="badge good">done</span>' in page
    assert '<td data-column="Worker">w1</td>' in page


def test_run_without_a_step_has_texts_instead_of_plots(http: httpx.Client) -> None:
    run = http.post("/v1/runs", json={"key": "new"}).json()["id"]
    page = http.get(f"/runs/{run}").raise_for_status().text
    assert "none yet" in page
    assert "No advice yet" in page
    for name in RUN_PLOTS:
        missing = http.get(f"/pages/runs/{run}/figures/{name}.json").json()["missing"]
        assert missing.endswith(".")
        assert name != "overview" or missing.startswith("No step is closed yet, and no scalar is one of reward, ")


def test_a_step_shows_measures_neighbours_and_worst_tokens(site: Site) -> None:
    assert "first step" in site.http.get(f"{site.run.address}/steps/1").text
    assert "last step" in site.http.get(f"{site.run.address}/steps/12").text
    page = site.http.get(f"{site.run.address}/steps/5").raise_for_status().text
    assert re.search(
        r'<th scope="row">k3_kl</th>.*?[\d.]+e-5<br><span class="interval">range: [\d.]+e-5 to [\d.]+e-5<',
        page,
        re.DOTALL,
    )
    assert "KL(μ‖π) if μ sampled, never negative" in page
    assert f'href="{site.run.address}/steps/4" rel="prev"' in page
    assert f'href="{site.run.address}/steps/6" rel="next"' in page
    assert re.findall(r'data-figure="[^"]+/([a-z-]+)\.json"', page) == list(STEP_PLOTS)
    assert "This step was not replayed" in page
    assert 'id="tokens-title"' in page
    tokens_address, corrections = re.findall(r'data-fragment="([^"]+)"', page)
    assert corrections.endswith("/corrections")
    tokens = site.http.get(tokens_address).raise_for_status().text
    worst, _, rollouts = tokens.partition("Worst rollouts")
    assert (worst.count('<th scope="row">'), rollouts.count('<th scope="row">')) == (20, 8)
    assert "<html" not in tokens


def test_step_says_what_changed_since_the_step_before(http: httpx.Client) -> None:
    run = start_run(http, "changed")
    for step, dtype in ((1, "bfloat16"), (2, "bfloat16"), (4, "float32")):
        batch = make_batch(16, seed=step)
        made = Fingerprint(engine="vllm", dtype=dtype)
        attributes = replace(batch.attributes, engine_fingerprint=made)
        run.put_shard(step, replace(batch, attributes=attributes)).raise_for_status()
    pages = {step: http.get(f"/runs/default/changed/steps/{step}").raise_for_status().text for step in (1, 2, 4)}
    assert "What changed since" not in pages[1]
    assert re.search(r'What changed since step 1</h2> <span class="muted">no setting', pages[2])
    assert re.search(r'What changed since step 2</h2> <span class="muted">engine.dtype bfloat16 → float32', pages[4])
    row = re.search(
        r'<th scope="row">reward mean</th><td class="number">([^<]+)</td><td class="number">([^<]+)', pages[4]
    )
    query = {"comparison": "rollout", "measure": "reward_mean"}
    rewards = run.get("measurements", **query).json()["columns"]["reward_mean"]
    assert row is not None
    assert [row[1], row[2]] == [number(each) for each in rewards[1:]]
    assert "token ids with the largest share of k3" in pages[4]


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/runs/run_nowhere", 404, "there is no run run_nowhere"),
        ("/runs/{run}/steps/99", 404, "the run has no rollouts of step 99; its newest step with rollouts is 12"),
        ("/runs/{run}/steps/abc", 422, "path.step: Input should be a valid integer"),
        ("/?page=0", 422, "query.page: Input should be greater than or equal to 1"),
        ("/alerts?state=&cursor=nonsense", 422, "the cursor is not from this list: start without a cursor"),
    ],
)
def test_an_error_of_a_page_is_a_page(site: Site, path: str, status: int, words: str) -> None:
    answer = site.http.get(path.format(run=site.run.id))
    assert answer.status_code == status
    assert answer.headers["content-type"].startswith("text/html")
    assert words in answer.text


@pytest.mark.parametrize("missing", ["/steps/99", "/steps/5/rollouts/none", "/steps/99/rollouts/5-0", "/steps/abc"])
def test_problem_below_a_run_links_back_to_it(site: Site, missing: str) -> None:
    answer = site.http.get(site.run.address + missing)
    assert answer.status_code in (404, 422)
    assert f'<a href="{site.run.address}">The run</a>' in answer.text
    assert "The run</a>" not in site.http.get(f"/runs/default/nowhere{missing}").text


def test_page_links_to_the_run_in_its_tracker(http: httpx.Client) -> None:
    body = {"key": "tracked", "tracker_url": "https://wandb.ai/me/project/runs/1?a=1&b"}
    run = http.post("/v1/runs", json=body).raise_for_status().json()["id"]
    link = '<a href="https://wandb.ai/me/project/runs/1?a=1&amp;b" rel="noreferrer">W&B</a>'
    assert link.replace("W&B", "W&amp;B") in http.get("/runs/default/tracked").text
    http.post("/v1/runs", json=body | {"tracker_url": "https://other/1"}).raise_for_status()
    assert 'rel="noreferrer">Tracker</a>' in http.get("/runs/default/tracked").text
    assert http.patch(f"/v1/runs/{run}", json={"tracker_url": "javascript:alert(1)"}).status_code == 422
    http.patch(f"/v1/runs/{run}", json={"tracker_url": None}).raise_for_status()
    assert "noreferrer" not in http.get("/runs/default/tracked").text


def test_unknown_address_is_a_page_for_a_browser_and_a_problem_for_others(site: Site) -> None:
    for address in ("/nowhere", "/runs", "/static/nothing.js"):
        page = site.http.get(address, headers={"Accept": "text/html,*/*"})
        assert (page.status_code, page.headers["content-type"]) == (404, "text/html; charset=utf-8")
        assert "There is no such page" in page.text
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
        assert site.http.get(address).headers["content-type"] == "application/problem+json"
    answer = site.http.get("/v1/nowhere", headers={"Accept": "text/html,*/*"})
    assert answer.headers["content-type"] == "application/problem+json"


def test_an_error_of_a_figure_is_a_problem(site: Site) -> None:
    answer = site.http.get(f"/pages/runs/{site.run.id}/figures/nonsense.json")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert "mismatch" in answer.json()["detail"]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_heavy_tail_is_critical_only_if_ratios_reach_e(http: httpx.Client) -> None:
    near, far = (send_run(http, f"noise {noise}", steps=1, noise=noise) for noise in (0.01, 2.0))
    figures = [http.get(f"/pages/runs/{run.id}/figures/tails.json").json() for run in (near, far)]
    colours = [[shape["line"]["color"] for shape in figure["layout"]["shapes"]] for figure in figures]
    assert "No ratio of this run reaches e" in figures[0]["caption"]
    assert "No ratio" not in figures[1]["caption"]
    assert colours[1].count("var(--critical)") > colours[0].count("var(--critical)")


def test_text_between_backticks_is_code_and_markup_is_escaped() -> None:
    assert with_code("look whether `entropy` is") == "look whether <code>entropy</code> is"
    assert with_code("a ` alone") == "a ` alone"
    assert with_code("`<script>` & <b>") == "<code>&lt;script&gt;</code> &amp; &lt;b&gt;"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_attribution_is_of_the_newest_active_replayed_step(http: httpx.Client, own_run: SentRun) -> None:
    figure = f"/pages/runs/{own_run.id}/figures/attribution.json"
    replay(http, own_run, 1)
    replay(http, own_run, 2)
    assert http.get(figure).json()["caption"].startswith("Step 2.")
    http.post(f"/v1/runs/{own_run.id}/attempts", json={"key": "again", "resume_step": 2}).raise_for_status()
    assert http.get(figure).json()["caption"].startswith("Step 1.")


def test_deleted_run_is_410(http: httpx.Client, own_run: SentRun) -> None:
    http.delete(f"/v1/runs/{own_run.id}").raise_for_status()
    answer = http.get(own_run.address)
    assert answer.status_code == 410
    assert "was deleted" in answer.text
    assert own_run.name not in http.get("/").text


def test_unchanged_page_is_304(site: Site) -> None:
    for path in ("/", site.run.address, f"/pages/runs/{site.run.id}/figures/mismatch.json"):
        first = site.http.get(path).raise_for_status()
        again = site.http.get(path, headers={"If-None-Match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b""), path
        assert again.headers["cache-control"] == "private, no-cache"


def test_new_data_changes_the_tag(http: httpx.Client) -> None:
    run = send_run(http, "growing", steps=3)
    path = f"/pages/runs/{run.id}/figures/mismatch.json"
    before = http.get(path).headers["etag"]
    send_run(http, "growing", steps=4)
    assert http.get(path, headers={"If-None-Match": before}).status_code == 200


def test_names_are_escaped(site: Site) -> None:
    for path in ("/", site.hostile.address, f"{site.hostile.address}/steps/1"):
        page = site.http.get(path).raise_for_status().text
        assert "<script>window" not in page
        assert "<img" not in page
        assert "&lt;script&gt;window.hacked=1&lt;/script&gt;" in page
        assert "{{7*7}}" in page, "a name is no template"


def test_every_page_forbids_inline_scripts_and_other_sites(site: Site) -> None:
    for path in ("/", site.run.address, f"{site.run.address}/steps/1", "/login", "/runs/run_nowhere"):
        answer = site.http.get(path)
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == "'self'"
        assert "unsafe" not in policy["style-src-elem"]
        assert policy["frame-ancestors"] == "'none'"
        assert_nothing_inline(answer.text)


class Inventory(HTMLParser):
    """Every element of a page with its attributes, as a browser would see them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def assert_nothing_inline(page: str) -> None:
    for tag, attributes in Inventory(page).elements:
        assert tag not in ("style", "img", "iframe", "object", "base")
        assert tag != "script" or str(attributes.get("src")).startswith("/static/")
        for name, value in attributes.items():
            assert name != "style"
            assert not name.startswith("on"), name
            if name in ("src", "href", "action"):
                assert re.match(r"/(?!/)|#", str(value)), f"{tag} {name} leads away: {value}"


def token_of(page: str) -> str:
    return str(re.findall(r'name="csrf_token" value="([\w-]{43})"', page)[0])


class TestSessions:
    @pytest.fixture
    def secrets(self, database: Database, http: httpx.Client) -> dict[Scope, str]:
        """A key for each scope; every request needs a key from now on."""
        secrets = {scope: new_secret() for scope in Scope}
        for scope, secret in secrets.items():
            database.write(lambda session, s=secret, o=scope: create_key(session, s, o.value, None, [o]))  # type: ignore[misc]
        return secrets

    def sign_in(self, http: httpx.Client, secret: str, next_path: str = "/") -> httpx.Response:
        return http.post("/login", data={"api_key": secret, "next": next_path})

    def test_page_without_a_session_leads_to_login_and_back(
        self, http: httpx.Client, secrets: dict[Scope, str]
    ) -> None:
        answer = http.get("/runs/run_1?x=1")
        assert answer.status_code == 303
        assert answer.headers["location"] == "/login?next=/runs/run_1%3Fx%3D1"
        form = http.get(answer.headers["location"]).text
        assert 'value="/runs/run_1?x=1"' in form
        answer = self.sign_in(http, secrets[Scope.READ], "/runs/run_1?x=1")
        assert (answer.status_code, answer.headers["location"]) == (303, "/runs/run_1?x=1")

    def test_session_cookie_is_http_only_and_same_site_strict(
        self, http: httpx.Client, secrets: dict[Scope, str]
    ) -> None:
        cookie = self.sign_in(http, secrets[Scope.READ]).headers["set-cookie"]
        assert cookie.startswith(f"{SESSION_COOKIE}=")
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
        assert secrets[Scope.READ] not in cookie

    def test_read_session_has_no_operator_forms(self, http: httpx.Client, secrets: dict[Scope, str]) -> None:
        admin = {"Authorization": f"Bearer {secrets[Scope.ADMIN]}"}
        run = http.post("/v1/runs", json={"key": "one"}, headers=admin).json()["id"]
        self.sign_in(http, secrets[Scope.READ])
        page = http.get(f"/runs/{run}").raise_for_status().text
        assert "Sign out" in page
        assert f'action="/runs/{run}/advice"' not in page
        answer = http.post(
            f"/runs/{run}/advice", data={"kind": "hold", "reason": "a test", "csrf_token": token_of(page)}
        )
        assert answer.status_code == 403
        assert "lacks the scope" in answer.text

    @pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
    def test_a_wrong_key_is_refused_on_the_form(self, http: httpx.Client, secrets: dict[Scope, str]) -> None:
        for secret in ("", "fsk_wrong", "x" * 199):
            answer = self.sign_in(http, secret or " ")
            assert answer.status_code == 401
            assert 'role="alert"' in answer.text
            assert "set-cookie" not in answer.headers
            assert secret == "" or secret not in answer.text

    def test_a_key_that_may_not_read_is_refused(self, http: httpx.Client, secrets: dict[Scope, str]) -> None:
        answer = self.sign_in(http, secrets[Scope.WORKER])
        assert answer.status_code == 403
        assert "set-cookie" not in answer.headers

    @pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
    def test_login_redirects_to_own_pages_only(self, http: httpx.Client, secrets: dict[Scope, str]) -> None:
        for path in ("https://evil.example", "//evil.example", "/\\evil.example", "javascript:alert(1)", "/\tx"):
            assert self.sign_in(http, secrets[Scope.READ], path).headers["location"] == "/", path

    def test_signing_out_needs_the_sessions_own_token(self, http: httpx.Client, secrets: dict[Scope, str]) -> None:
        self.sign_in(http, secrets[Scope.READ])
        assert http.post("/logout", data={"csrf_token": "0" * 64}).status_code == 403
        assert http.get("/").status_code == 200
        token = token_of(http.get("/").text)
        copied = dict(http.cookies)
        assert http.post("/logout", data={"csrf_token": token}).headers["location"] == "/login"
        assert http.get("/").status_code == 303
        copies = {"Cookie": "; ".join(f"{name}={value}" for name, value in copied.items())}
        assert http.get("/", headers=copies).status_code == 303
        assert http.get("/v1/runs", headers=copies).status_code == 401

    def test_logging_out_ends_this_session_only(self, http: httpx.Client, secrets: dict[Scope, str]) -> None:
        self.sign_in(http, secrets[Scope.READ])
        with httpx.Client(base_url=http.base_url, timeout=60) as other:
            self.sign_in(other, secrets[Scope.READ])
            other.post("/logout", data={"csrf_token": token_of(other.get("/").text)})
            assert other.get("/").status_code == 303
        assert http.get("/").status_code == 200

    def test_a_figure_is_refused_with_a_problem(self, http: httpx.Client, secrets: dict[Scope, str]) -> None:
        answer = http.get("/pages/runs/run_1/figures/mismatch.json")
        assert answer.status_code == 401
        assert answer.headers["content-type"] == "application/problem+json"


def test_pages_are_not_part_of_the_api_description(site: Site) -> None:
    paths = site.http.get("/openapi.json").json()["paths"]
    assert all(path.startswith("/v1/") or path in ("/livez", "/readyz", "/metrics") for path in paths)


def test_run_page_and_its_curves_tell_of_changes(http: httpx.Client) -> None:
    sender = start_run(http, key="changing")
    for step, device in enumerate(["H100", "H100", "<b>A100</b>"]):
        attributes = BatchAttributes(engine_fingerprint=Fingerprint(engine="vllm", device_name=device))
        sender.put_shard(step, make_batch(seed=step, attributes=attributes)).raise_for_status()
    body = {"before": 2048, "after": 4096.5, "note": "as planned"}
    http.put(f"/v1/runs/{sender.run}/changes/1/length_cap", json=body).raise_for_status()
    page = http.get("/runs/default/changing").raise_for_status().text
    assert "2 changes within the run, the newest: step 2, engine.device_name H100 → &lt;b&gt;A100&lt;/b&gt;" in page
    assert "step 1, length cap 2048 → 4096.5 (as planned)" in page
    for name, plot in RUN_PLOTS.items():
        figure = http.get(f"/pages/runs/{sender.run}/figures/{name}.json").raise_for_status().json()
        if "missing" not in figure:
            lines = [each for each in figure["layout"].get("shapes", []) if each.get("line", {}).get("dash") == "dot"]
            assert {each["x0"] for each in lines} == ({1, 2} if plot.over_steps else set())


def test_near_certificates_are_a_fact_of_the_page_and_the_report(http: httpx.Client) -> None:
    """Of the same engine, dtype and hardware only: on other hardware nothing is said."""
    engines = [engine for each in entries() if (engine := engine_of(each)) is not None and engine.flags]
    certified = next(each for each in engines if each.engine == "vllm")
    elsewhere = replace(certified, device_name="NVIDIA H200", flags={}, driver="580.1")
    for key, engine in (("certified", certified), ("elsewhere", elsewhere)):
        sender = start_run(http, key=key)
        sender.put_shard(0, make_batch(attributes=BatchAttributes(engine_fingerprint=engine))).raise_for_status()
        texts = [http.get(path).text for path in (f"/runs/default/{key}", f"/pages/runs/{sender.run}/text")]
        assert all("certificates of" not in text for text in texts), "the kind of model is unknown"
        http.patch(f"/v1/runs/{sender.run}", json={"model_kind": "dense"}).raise_for_status()
        texts = [http.get(path).text for path in (f"/runs/default/{key}", f"/pages/runs/{sender.run}/text")]
        told = f"certificates of vllm {certified.engine_version} on"
        assert all((told in " ".join(text.split())) == (engine is certified) for text in texts)


def test_link_chooses_the_run_in_its_dashboard(site: Site) -> None:
    built = dashboard()
    assert "run" in [variable.name for variable in built.variables]
    linked = run_dashboard(Settings(grafana_url="https://grafana.example/"), "run_1")
    assert linked == f"https://grafana.example/d/{built.uid}?var-run=run_1"
    # Without an address there is no link.
    assert run_dashboard(Settings(), "run_1") is None
    for path in (site.run.address, f"{site.run.address}/steps/5"):
        assert "Grafana" not in site.http.get(path).raise_for_status().text
