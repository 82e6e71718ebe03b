"""Claude Code and Codex CLI themselves, from the npm registry, at work in a folder: they call, and what they were told is there.

The model is a script that asks for tools of theirs; everything else is as a user has it. Slow: the two are 650 MB.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed"),
]
Server = Any
PACKAGES = ("@anthropic-ai/claude-code", "@openai/codex")
# Shows all that a template is given; what a turn adds stands behind all that was there before it.
SHOWS_ALL = "{{ tools | tojson }}\n{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
CODEX = """
model = "scripted"
model_provider = "halfbyte"
[model_providers.halfbyte]
name = "Halfbyte"
base_url = "{url}/v1"
wire_api = "responses"
"""


class Script(dict[tuple[int, ...], str]):
    """Answers by how many results of tools a prompt holds; keeps the prompts."""

    def __init__(self, server: Server, *answers: tuple[str, dict[str, Any]] | str) -> None:
        self.server, self.answers = server, answers
        self.prompts: list[str] = []

    def get(self, ids: tuple[int, ...], default: object = None) -> str:  # type: ignore[override]
        self.prompts.append(self.server.tokenizer.decode(list(ids), skip_special_tokens=False))
        answer = self.answers[self.prompts[-1].count('{"role": "tool"')]
        if isinstance(answer, str):
            return answer
        name, arguments = answer
        return f'So.\n<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.fixture(scope="session")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of their commands."""
    prefix = tmp_path_factory.mktemp("agents")
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--prefix", prefix, *PACKAGES], check=True, timeout=800)
    return prefix / "node_modules" / ".bin"


@pytest.fixture
def server(start_scripted: Callable[..., Server]) -> Server:
    info = {"max_model_len": 400_000, "max_num_batched_tokens": 400_000}
    flags = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True, "chat_template": SHOWS_ALL}
    return start_scripted(info=info, **flags)


def run(command: list[str | Path], folder: Path, **environment: str) -> str:
    """What an agent prints, which sees no home, no settings and no keys but these."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    (folder / "work").mkdir()
    known = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb"}
    ended = subprocess.run(
        command,
        cwd=folder / "work",
        env=known | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def each_extends_the_one_before(prompts: list[str]) -> bool:
    return all(longer.startswith(prompt) for prompt, longer in zip(prompts, prompts[1:], strict=False))


def test_claude_code_writes_a_file_and_reads_it(server: Server, agents: Path, tmp_path: Path) -> None:
    file = tmp_path / "work" / "hello.txt"
    script = server.model.says = Script(
        server,
        ("Write", {"file_path": str(file), "content": "hello\n"}),
        ("Bash", {"command": f"cat {file}", "description": "shows it"}),
        "It says hello.",
    )
    command = [agents / "claude", "-p", "Write hello.txt.", "--allowedTools", "Write Bash", "--output-format", "json"]
    printed = run(
        command,
        tmp_path,
        ANTHROPIC_BASE_URL=server.url,
        ANTHROPIC_API_KEY="unused",
        ANTHROPIC_MODEL="scripted",
        ANTHROPIC_DEFAULT_HAIKU_MODEL="scripted",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        IS_SANDBOX="1",
    )
    told = json.loads(printed)
    assert told["result"] == "It says hello." and told["num_turns"] == 3 and not told["is_error"]
    assert file.read_text() == "hello\n" and "hello" in script.prompts[-1].splitlines()[-1]
    assert len(script.prompts) == 3 and each_extends_the_one_before(script.prompts)


def test_codex_runs_a_command_and_a_tool_of_a_namespace(server: Server, agents: Path, tmp_path: Path) -> None:
    script = server.model.says = Script(
        server,
        ("exec_command", {"cmd": "echo hello > hello.txt"}),
        ("multi_agent_v1__close_agent", {"target": "nobody"}),
        "It is written.",
    )
    settings = tmp_path / "home" / ".codex" / "config.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text(CODEX.format(url=server.url))
    command = [
        agents / "codex",
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        "Write hello.txt.",
    ]
    assert "It is written." in run(command, tmp_path)
    assert (tmp_path / "work" / "hello.txt").read_text() == "hello\n"
    assert "nobody" in script.prompts[-1].splitlines()[-1], "the tool of the namespace was called, and has refused"
    assert len(script.prompts) == 3 and each_extends_the_one_before(script.prompts)
