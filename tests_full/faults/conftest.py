"""Prints a table of the counts of all fault tests."""


def pytest_terminal_summary(terminalreporter):
    rows = [
        (report.nodeid.rpartition("::")[2], name, value)
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if "tests_full/faults/" in report.nodeid
        for name, value in report.user_properties
        if name.startswith("faults: ")
    ]
    if rows:
        terminalreporter.section("faults")
        for test, name, value in rows:
            terminalreporter.write_line(f"{test}: {name.removeprefix('faults: ')}: {value}")
