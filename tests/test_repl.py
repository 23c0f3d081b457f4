"""Code that a model wrote: what it may do, sixty ways out that are refused, and a process that is not believed."""
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from atlas_rlvr import repl as page
from atlas_rlvr.environments import tool_schemas
from atlas_rlvr.repl import LINE, OUTPUT, STOPPED, Repl, check_repl, objection, run_code

pytest.importorskip("smolagents", reason="the Python prompt is not installed")
TOOLS = tool_schemas("cross")

# (id, code): every one of them must be refused
ESCAPES = {
    "dunder walk": "().__class__.__bases__[0].__subclasses__()",
    "dunder in a format string": "'{0.__class__.__mro__}'.format(1)",
    "format string by map": "list(map('{0.__class__}'.format, [1]))",
    "format_map": "'{x.__class__}'.format_map({'x': 1})",
    "str.format": "str.format('{0.__class__}', 1)",
    "getattr": "getattr((), '__class__')",
    "getattr with a lying name": "class S(str):\n    def startswith(self, other): return False\ngetattr((), S('__class__'))",
    "setattr": "setattr(get_issue, 'x', 1)",
    "type": "type('S', (str,), {})",
    "mro": "int.mro()",
    "vars": "vars(get_issue)",
    "import os": "import os\nos.system('touch escaped')",
    "import as": "import os as math",
    "from os": "from os import environ",
    "import inside a function": "def f():\n    import subprocess\nf()",
    "module of a module": "import json\njson.codecs.builtins",
    "submodule": "import json.decoder",
    "name of a module": "from json import codecs",
    "star": "from math import *",
    "relative import": "from . import world",
    "loader": "import math\nmath.__loader__",
    "__import__": "__import__('os')",
    "__builtins__": "__builtins__['open']",
    "eval": "eval('1 + 1')",
    "exec": "exec('x = 1')",
    "compile": "compile('1', '', 'eval')",
    "open to read": "open('/etc/passwd').read()",
    "open to write": "open('escaped', 'w').write('x')",
    "network": "import socket\nsocket.create_connection(('127.0.0.1', 80))",
    "url": "from urllib.request import urlopen\nurlopen('http://127.0.0.1')",
    "generator frame": "g = (x for x in [1])\ng.gi_frame.f_locals['authorized_imports'].append('os')\nimport os",
    "generator code": "(x for x in [1]).gi_code",
    "traceback": "try:\n    1 / 0\nexcept Exception as e:\n    e.__traceback__.tb_frame.f_back",
    "with_traceback": "try:\n    1 / 0\nexcept Exception as e:\n    e.with_traceback",
    "globals of a tool": "get_issue.__globals__",
    "closure of a tool": "get_issue.__closure__",
    "code of a lambda": "(lambda: 0).__code__",
    "the interpreter's counter": "_operations_count['counter'] = -10**9",
    "the interpreter's output": "_print_outputs.value",
    "underscore argument": "def f(_print_outputs): return 1\nf(1)",
    "endless loop": "while True: pass",
    "endless for": "for i in range(10**12): pass",
    "endless recursion": "def f(n): return f(n + 1)\nf(0)",
    "caught endless loop": "def f():\n    try:\n        while True: pass\n    except Exception:\n        return f()\nf()",
    "memory at once": "[0] * 10**10",
    "memory bit by bit": "kept = []\nwhile True:\n    kept.append('a' * 10**6 + str(len(kept)))",
    "memory in an f-string": "f'{1:9999999999}'",
    "exit": "raise SystemExit",
    "interrupt": "raise KeyboardInterrupt",
    "class": "class A: pass",
    "with": "with get_issue as x: pass",
    "yield": "def f(): yield 1\nlist(f())",
    "walrus": "(x := 1)",
    "global": "global x\nx = 1",
    "async": "async def f(): pass",
    "brackets": "(" * 10**5,
    "minus signs": "-" * 10**5 + "1",
    "null byte": "x = 1\0",
    "surrogate": "x = '\udc80'\nget_issue\udc80",
    "set as an argument": "get_issue({1, 2})",
    "function as an argument": "get_issue(print)",
    "not a number": "get_issue(float('nan'))",
    "long argument": "get_issue('a' * 2 * 10**6)",
    "deep argument": "x = []\nfor i in range(3000): x = [x]\nget_issue(x)",
    "too many arguments": "get_issue('ABC-123', 'ABC-124')",
    "one argument twice": "get_issue('ABC-123', issueIdOrKey='ABC-124')",
    "new tool": "get_issue = 1",
    "regular expression without end": "import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
}
POWER = "10**10**8"


@pytest.fixture(scope="module")
def prompt():
    repl = Repl(TOOLS)
    yield repl
    repl.close()


def forbidden(name, arguments):
    raise AssertionError(f"{name} was called")


def is_a_sentence(text):
    return text.endswith(".") and "\n" not in text and len(text) < 320


@pytest.mark.parametrize("name", ESCAPES)
def test_every_way_out_is_refused_in_one_sentence(name, prompt, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environment, modules = dict(os.environ), set(sys.modules)
    result = run_code(prompt, ESCAPES[name], forbidden)
    assert result["error"] and is_a_sentence(result["error"]) and result["final"] is None
    assert list(tmp_path.iterdir()) == [] and dict(os.environ) == environment
    assert not {"smolagents"} & (set(sys.modules) - modules)  # the interpreter lives elsewhere
    assert run_code(prompt, "1 + 1", forbidden) == {"output": "2\n", "error": None, "final": None}


def test_what_cannot_be_interrupted_is_killed(prompt):
    run_code(prompt, "kept = 1", forbidden)
    before = prompt.pid
    assert run_code(prompt, POWER, forbidden)["error"] == STOPPED
    assert "not defined" in run_code(prompt, "kept", forbidden)["error"] and prompt.pid != before


@pytest.mark.parametrize("code, shown", [("print('a' * 10**6)", 10**6 + 1), ("'a' * 10**6", 10**6 + 3)])
def test_long_output_is_cut(code, shown, prompt):
    result = run_code(prompt, code, forbidden)
    assert result["error"] is None and len(result["output"]) < OUTPUT + 60
    assert result["output"].endswith(f"(cut: {OUTPUT} of {shown} characters)")
    assert len(run_code(prompt, "final_answer('a' * 10**6)", forbidden)["final"]) == OUTPUT


@pytest.mark.parametrize("code, output", [
    ("x = 3\nx", "3\n"), ("x = 3", ""), ("print('a', 1)\n'b'", "a 1\n'b'\n"), ("None", ""), ("", ""),
    ("def double(n): return 2 * n\n[double(n) for n in range(3)]", "[0, 2, 4]\n"),
    ("import json\njson.loads('{\"a\": [1]}')['a']", "[1]\n"), ("import math as m\nm.floor(2.5)", "2\n"),
    ("from re import findall\nfindall('[a-z]+', 'ab cd')", "['ab', 'cd']\n"),
    ("try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    print('caught:', error)", "caught: division by zero\n"),
    ("for _ in range(2): print('x')", "x\nx\n"), ("f'{2 / 3:.2f}'", "'0.67'\n"), ("{'a': 1}.get('b', 2)", "2\n"),
    ("' a '.strip().upper()", "'A'\n"), ("sorted({'b': 1, 'a': 2}.items(), key=lambda row: row[1])[0][0]", "'b'\n")])
def test_ordinary_code_works(code, output, prompt):
    assert run_code(prompt, code, forbidden) == {"output": output, "error": None, "final": None}


def test_calls_come_in_order_with_their_answers(prompt):
    made = []

    def call(name, arguments):
        made.append((name, arguments))
        return {"status": 200, "body": {"n": len(made)}}
    code = ("first = get_issue('ABC-123')\nsecond = create_page('PAY', 'T', body={'value': first['body']['n']})\n"
            "[first['body']['n'], second['body']['n']]")
    assert run_code(prompt, code, call)["output"] == "[1, 2]\n"
    assert made == [("get_issue", {"issueIdOrKey": "ABC-123"}),
                    ("create_page", {"spaceId": "PAY", "title": "T", "body": {"value": 1}})]


def test_refused_code_has_done_nothing(prompt):
    assert run_code(prompt, "get_issue('ABC-123')\nimport os", forbidden)["error"].startswith("`import os`")


def test_two_prompts_share_nothing(prompt):
    other = Repl(TOOLS)
    run_code(prompt, "secret = 1", forbidden)
    assert "not defined" in run_code(other, "secret", forbidden)["error"]
    other.close()


def test_an_error_of_the_parent_is_not_the_code_s(prompt):
    with pytest.raises(AssertionError, match="get_issue was called"):
        run_code(prompt, "try:\n    get_issue('ABC-123')\nexcept Exception:\n    pass", forbidden)
    assert prompt.channel is None and run_code(prompt, "1 + 1", forbidden)["output"] == "2\n"


def test_a_host_that_was_killed_is_started_again(prompt):
    host = page._host()[0]
    host.kill()
    host.wait()
    other = Repl(TOOLS)
    assert run_code(other, "1 + 1", forbidden)["output"] == "2\n" and page._host()[0] is not host
    other.close()


# A child that is not the one we wrote


def impostor(monkeypatch, says, hangs_up=False):
    "A prompt whose child sends these bytes after its greeting; the id it gives is that of a process which may be killed."
    victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ours, theirs = socket.socketpair()

    def speak():
        lines = theirs.makefile("rb")
        lines.readline()
        theirs.sendall(json.dumps({"pid": victim.pid}).encode() + b"\n")
        lines.readline()
        theirs.sendall(says)
        lines.close()
        if hangs_up:
            theirs.close()
    threading.Thread(target=speak, daemon=True).start()
    monkeypatch.setattr(page, "_open_channel", lambda: ours)
    return Repl(TOOLS), victim, theirs


@pytest.mark.parametrize("says", [
    b"hello\n", b"[1]\n", b"null\n", b"[" * 10**5 + b"\n", b"{}\n", b'{"output": ""}\n', b'{"call": "get_issue"}\n',
    b'{"call": "rm", "arguments": {}}\n', b'{"call": ["get_issue"], "arguments": {}}\n',
    b'{"call": "get_issue", "arguments": "x"}\n', b"a" * (LINE + 9), b"silence"], ids=range(12))
def test_an_impostor_is_killed(says, monkeypatch):
    monkeypatch.setattr(page, "LONGEST", 0.5)
    repl, victim, theirs = impostor(monkeypatch, says)
    assert run_code(repl, "1 + 1", forbidden)["error"] == STOPPED
    assert victim.wait(10) == -signal.SIGKILL and repl.channel is None
    theirs.close()


@pytest.mark.parametrize("says", [b"", b'{"call": "get_issue", "argum'], ids=["silence", "half a line"])
def test_one_that_hangs_up_is_let_go(says, monkeypatch):
    repl, victim, _ = impostor(monkeypatch, says, hangs_up=True)
    assert run_code(repl, "1 + 1", forbidden)["error"] == STOPPED
    victim.communicate(b"\n")
    assert victim.returncode == 0 and repl.channel is None  # not killed: its number may be another's by now


# The walls behind the interpreter


DEEDS = ["open('kept')", "open('new', 'w')", "os.remove('kept')", "os.rename('kept', 'gone')", "os.mkdir('made')",
         "os.listdir('.')", "os.chmod('kept', 0)", "os.symlink('kept', 'link')", "socket.socket()", "os.system('true')",
         "subprocess.run(['true'])", "os.fork()", "os.kill(os.getppid(), 15)", "__import__('ctypes')", "'x' * 10**10",
         "exec('1')", "sys._getframe()", "resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9))", "os.putenv('A', 'B')"]


def test_plain_python_in_the_process_gets_no_further(tmp_path):
    (tmp_path / "kept").write_text("kept")
    program = f"""
import json, os, resource, socket, subprocess, sys
from atlas_rlvr.repl import confine
deeds = [{', '.join('lambda: ' + deed for deed in DEEDS)}]
confine()
os.environ and os._exit(9)
for deed in deeds:
    try: deed()
    except (PermissionError, MemoryError) as error: print(type(error).__name__)
    else: print('done')
os._exit(sys.stdout.flush() or 0)"""
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *sys.path]))
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": paths}, check=True)
    found = dict(zip(DEEDS, done.stdout.split(), strict=True))
    assert {deed: how for deed, how in found.items() if how == "done"} == {}
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and (tmp_path / "kept").read_text() == "kept"


def test_the_host_gets_no_secret(monkeypatch, prompt):
    run_code(prompt, "1", forbidden)
    with open(f"/proc/{page._host()[0].pid}/environ", "rb") as file:
        names = {pair.split(b"=")[0] for pair in file.read().split(b"\0") if pair}
    assert names <= {b"PYTHONHASHSEED", b"HF_HUB_OFFLINE", b"LC_CTYPE"}


# What is missing


@pytest.mark.parametrize("module, attribute, value, words", [
    (page, "find_spec", lambda name: None, "pip install -e '.[scaffolds]'"), (os, "fork", None, "Linux or macOS")])
def test_what_is_missing_is_said(module, attribute, value, words, monkeypatch):
    monkeypatch.setattr(module, attribute, value) if value else monkeypatch.delattr(module, attribute)
    with pytest.raises(ValueError, match=words.replace("[", r"\[")):
        check_repl()


@pytest.mark.parametrize("code", ["x = 1", "def f(a, *b, **c): return a", "f(x=1)", "[x for x in y if x]", "lambda: 1"])
def test_there_is_no_objection_to_plain_code(code):
    assert objection(code) is None


def test_an_interpreter_that_does_not_start_is_said(monkeypatch):
    ours, theirs = socket.socketpair()
    theirs.close()
    monkeypatch.setattr(page, "_open_channel", lambda: ours)
    with pytest.raises(RuntimeError, match="import smolagents"):
        run_code(Repl(TOOLS), "1", forbidden)
