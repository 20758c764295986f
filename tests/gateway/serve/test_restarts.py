"""What a supervisor makes of a role's end and of its reports."""

from __future__ import annotations

from kvferry.gateway.serve.restarts import ReportReader, Restarts, RoleReport


def test_restarts_come_ever_later_until_a_role_was_steady() -> None:
    restarts = Restarts()
    restarts.became_ready(0.0)
    assert [restarts.ended(1, 1.0) for _ in range(8)] == [0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    restarts.became_ready(10.0)
    assert restarts.ended(-9, 10.0 + Restarts.STEADY_S) == 0.1


def test_what_was_never_ready_is_given_up() -> None:
    assert Restarts().ended(2, 0.0) is None, "a configuration error is never retried"
    restarts = Restarts()
    delays = [restarts.ended(1, 0.0) for _ in range(Restarts.FIRST_TRIES)]
    assert None not in delays[:-1] and delays[-1] is None


def test_reports_come_whole_however_they_are_cut() -> None:
    data = b'{"address": "tcp://h:1"}\n{"ready": true}\n{"error": "no"}\n'
    whole = [RoleReport("tcp://h:1"), RoleReport(ready=True), RoleReport(error="no")]
    for cut in range(len(data)):
        reader = ReportReader()
        assert reader.feed(data[:cut]) + reader.feed(data[cut:]) == whole
