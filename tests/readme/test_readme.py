"""Run the README's programs and commands in order, as written."""

from pages import README, blocks, commands, programs


def test_readme_quick_start_prints_what_it_shows(shop):
    assert list(programs(README)) == ["tasks.py", "signup.py"]
    run = shop(README)
    typed = [line for line in commands(README) if line.startswith(("python signup", "reliq worker"))]

    said = "".join(map(run, typed))

    assert said == blocks(README, "text")[0]
