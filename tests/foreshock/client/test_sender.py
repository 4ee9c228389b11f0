"""Tests of what is sent: whose acknowledgements and ends they are."""

import json
from typing import Any

from tests.foreshock.client.faulty_service import FaultyService
from tests.waiting import wait_until


def test_acknowledgement_and_end_say_whose_they_are_also_those_that_an_earlier_process_left_in_the_spool(
    make: Any, service: FaultyService
) -> None:
    service.stop()
    first = make(attempt_key="first")
    first.start_run()
    first.acknowledge(1, 300, 1e-6, 1.0)
    first.finish(failed=True)
    first.close(1)
    service.start()
    second = make(attempt_key="second", heartbeat_seconds=0.05)
    second.start_run(resume_step=4)
    second.acknowledge(2, 4, 1e-7, 0.1)
    assert second.flush(60)
    sent = [json.loads(body) for body in service.bodies("/ack")]
    assert {each["step"]: each["attempt"] for each in sent} == {300: 1, 4: 2}
    assert second.attempt == 2
    [end] = (request.json() for request in service.received if request.method == "PATCH")
    assert end == {"state": "failed", "attempt": 1}
    before = len(service.bodies("/clients/"))
    wait_until(lambda: len(service.bodies("/clients/")) > before, 20)
