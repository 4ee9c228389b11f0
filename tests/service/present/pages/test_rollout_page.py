"""The page of a rollout: tokens as text, coloured by d, with every scorer's log-prob, by mouse and by keyboard."""

import html
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from foreshock.rollouts import RolloutBatch
from foreshock.vocabulary import digest_of_texts
from foreshock_service.present.pages import tokenizers
from tests.service.present.pages.browsing import Visit
from tests.service.present.pages.conftest import SentRun, Site, rollouts
from tests.service.sending import Sender, start_run
from tests.service.working import announce_checkpoint, ask_for_probe, take_lease

LONG = 32_768
SAMPLE = "group/1 ü"
IN_VIEW = """token => {
    const [shown, pane] = [token, token.closest(".tokens")].map(each => each.getBoundingClientRect());
    return pane.top <= shown.top && shown.bottom <= pane.bottom;
}"""


def long_rollout(tokens: int, d_at: int) -> RolloutBatch:
    """One rollout of several turns with masked tool output, and one large d."""
    random = np.random.default_rng(5)
    behaviour = -random.exponential(1.0, tokens).astype(np.float32)
    trainer = np.minimum(behaviour + random.normal(0.0, 0.01, tokens), 0.0).astype(np.float32)
    behaviour[d_at], trainer[d_at] = -0.25, -4.25
    mask = np.ones(tokens, np.uint8)
    mask[100:120] = 0
    return RolloutBatch(
        sample_ids=[SAMPLE], prompt_token_ids=np.array([3, 5, 7], np.int32), prompt_offsets=np.array([0, 3]),
        response_token_ids=random.integers(1, 100, tokens).astype(np.int32), response_offsets=np.array([0, tokens]),
        rollout_log_probs=behaviour, trainer_log_probs=trainer, response_mask=mask,
        entropy=np.full(tokens, 0.5, np.float32), turn=np.repeat(np.arange(4, dtype=np.int16), tokens // 4),
        reward=np.array([1.0], np.float32), attributes=rollouts(1, 0.1).attributes,
    )  # fmt: skip


def send(site: Site, key: str, batch: RolloutBatch) -> str:
    """Send a run of one step, and return the address of its first rollout's page."""
    sender = start_run(site.http, key, model="tiny")
    sender.put_shard(1, batch).raise_for_status()
    return f"{SentRun(sender.run, key, key).address}/steps/1/rollouts/{quote(batch.sample_ids[0], safe='')}"


@pytest.fixture(scope="module")
def long_address(site: Site) -> str:
    """The page of a rollout of 32,768 tokens."""
    return send(site, "long", long_rollout(LONG, d_at=30_000))


def test_page_names_its_worst_token_without_a_script(site: Site, long_address: str) -> None:
    text = site.http.get(long_address).raise_for_status().text
    assert re.search(r"largest \|d\| of trainer/rollout is at position 30000, token id \d+: d = −4\.", text)
    assert "−0.25" in text
    assert "−4.25" in text
    assert "0.779" in text, "the probability under the rollout, e^−0.25"
    assert site.http.get(f"{long_address}x").status_code == 404


@pytest.mark.slow
def test_viewer_opens_at_the_largest_d(visit: Visit, site: Site, long_address: str) -> None:
    page = visit.open(site.url, long_address)
    selected = page.locator(".lines .selected")
    assert selected.get_attribute("data-at") == "30000"
    assert "below" in str(selected.get_attribute("class")), "π < μ"
    assert selected.evaluate(IN_VIEW)
    panel = page.locator(".rollout .token").inner_text()
    assert "|d| no. 1 of 32748" in panel
    assert "turn 3" in panel
    assert "entropy 0.500 nats" in panel
    assert re.search(r"trainer\s+−4\.25\s+0\.01426", panel)
    visit.assert_clean()


@pytest.mark.slow
def test_keyboard_moves_through_the_tokens(visit: Visit, site: Site, long_address: str) -> None:
    page = visit.open(site.url, long_address)
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".lines .selected").get_attribute("data-at") == "30001"
    page.keyboard.press("Home")
    page.keyboard.press("n")
    second = page.locator(".lines .selected").get_attribute("data-at")
    assert second not in ("30000", "30001")
    assert "no. 2 of" in page.locator(".rollout .token").inner_text()
    page.keyboard.press("p")
    assert page.locator(".lines .selected").get_attribute("data-at") == "30000"
    assert page.locator(".lines .selected").evaluate(IN_VIEW)
    assert page.url.endswith("#token-30000")


@pytest.mark.slow
def test_turns_and_masked_tokens_are_marked_beside_the_prompt(visit: Visit, site: Site, long_address: str) -> None:
    page = visit.open(site.url, f"{long_address}#token-105")
    assert page.locator(".lines .masked").count() == 20
    assert "not sampled by the model" in page.locator(".rollout .token").inner_text()
    page.locator(".tokens").evaluate("e => { e.scrollTop = 0; }")
    page.locator(".lines .turn", has_text="turn 0").wait_for()
    prompt, response = page.locator(".prompt-text"), page.locator(".tokens")
    assert prompt.inner_text() == "3 5 7 "
    boxes = [each.bounding_box() for each in (prompt, response)]
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[0]["x"] + boxes[0]["width"] < boxes[1]["x"], "the prompt is beside the response"
    page.locator(".lines [data-at='3']").hover()
    assert "Position 3," in page.locator(".rollout .token").inner_text()
    visit.assert_clean()


@pytest.mark.slow
def test_worst_tokens_of_a_step_lead_to_the_token(visit: Visit, site: Site) -> None:
    page = visit.open(site.url, f"{site.replayed.address}/steps/3")
    worst = page.get_by_role("region", name="Worst tokens").locator("tbody tr").first
    position = worst.locator("[data-column=Position]").inner_text()
    worst.get_by_role("link").click()
    page.wait_for_selector("body[data-drawn=yes] .tokens")
    assert page.locator(".lines .selected").get_attribute("data-at") == position
    page.get_by_label("Colour by").select_option("torch.trainer/vllm.prefill")
    assert "(torch.trainer/vllm.prefill)" in page.locator(".rollout .token").inner_text()
    visit.assert_clean()


def test_worst_rollouts_of_a_step_are_links(site: Site) -> None:
    text = site.http.get(f"/pages/runs/{site.run.id}/steps/5/tokens").raise_for_status().text
    found = re.findall(r'<a href="([^"#]+)"><code>(5-\d+)</code>', text.partition("Worst rollouts")[2])
    assert len(found) == 8
    site.http.get(found[0][0]).raise_for_status()


def test_rollout_of_one_scorer_says_that_nothing_can_be_compared(site: Site) -> None:
    alone = replace(long_rollout(8, d_at=0), trainer_log_probs=None, response_mask=None)
    text = site.http.get(send(site, "alone", alone)).raise_for_status().text
    assert "log-probs of fewer than two scorers" in text


def tokenizer_below(root: Path, name: str) -> None:
    vocabulary = {"▁hello": 0, "world": 1, "▁": 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="▁"))
    tokenizer.decoder = decoders.Metaspace()
    (root / name).mkdir(parents=True)
    tokenizer.save(str(root / name / "tokenizer.json"))


def test_tokens_are_text_by_the_announced_tokenizer_of_the_configured_folder(tmp_path: Path) -> None:
    tokenizer_below(tmp_path, "owner/tiny")
    vocabulary = tokenizers.announced_vocabulary(str(tmp_path), [{"tokenizer": "owner/tiny"}], None)
    assert vocabulary is not None
    assert tokenizers.texts_of(vocabulary, [0, 1, 9]) == {0: " hello", 1: "world", 9: "‹9›"}
    assert tokenizers.announced_vocabulary(str(tmp_path), [{}], "owner/tiny") == vocabulary
    (tmp_path / "owner/tiny/tokenizer.json").write_text('{"no": "tokenizer"}')
    assert tokenizers.announced_vocabulary(str(tmp_path), [], "owner/tiny") is None


def test_texts_are_those_that_a_worker_sent_and_ids_beyond_them_are_counted(site: Site) -> None:
    address = send(site, "told", replace(long_rollout(8, d_at=0), response_mask=None))
    run = site.http.get("/v1/runs/told").raise_for_status().json()["id"]
    assert "Token ids: no tokenizer is known yet." in site.http.get(address).text
    sender = Sender(site.http, run)
    announce_checkpoint(sender, 1)
    ask_for_probe(sender, 1).raise_for_status()
    holder = take_lease(site.http)
    assert holder.lease["job"]["wants_vocabulary"]
    texts = [f" <b>{number}" for number in range(60)]

    def put(first: int, digest: str = digest_of_texts(texts)) -> httpx.Response:
        body = {"digest": digest, "size": 60, "first": first, "texts": texts[first : first + 30]}
        return holder.put_document(body, "vocabulary")

    assert put(30).status_code == 422, "the first part is missing"
    put(0).raise_for_status()
    assert "no tokenizer is known" in site.http.get(address).text
    put(30).raise_for_status()
    page = html.unescape(site.http.get(address).text)
    columns = site.http.get(f"/pages/runs/{run}/steps/1/rollout", params={"sample_id": SAMPLE}).json()
    unknown = {each for each in (*columns["ids"], *columns["prompt"]) if each >= 60}
    assert unknown
    beyond = f"{len(unknown)} token id" + (" is" if len(unknown) == 1 else "s are")
    assert f"{beyond} beyond the tokenizer: it may be another model's." in page
    assert columns["texts"]["3"] == " <b>3"
    assert all(columns["texts"][str(each)] == f"‹{each}›" for each in unknown)
    holder.fail("final")


@pytest.mark.parametrize("name", ["../outside", "/etc", "owner/../owner/tiny", "missing"])
def test_name_of_a_tokenizer_never_becomes_a_path(tmp_path: Path, name: str) -> None:
    tokenizer_below(tmp_path / "root", "owner/tiny")
    tokenizer_below(tmp_path, "outside")
    assert tokenizers.announced_vocabulary(str(tmp_path / "root"), [{"tokenizer": name}], name) is None
    assert tokenizers.announced_vocabulary(str(tmp_path / "root"), [{"tokenizer": "owner/tiny"}], None) is not None
    assert tokenizers.announced_vocabulary("", [], "owner/tiny") is None
