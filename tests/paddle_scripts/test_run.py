"""`polyreme run` is plain Python with polyreme as paddle: arguments, exit codes, tracebacks, children."""

import os
import subprocess
import sys

import pytest

from polyreme.cli.main import main
from polyreme.paddle_scripts.command import environment
from polyreme.paddle_scripts.finder import FOLDER


def run(*words, cwd, stdin=None, **env):
    return subprocess.run(
        [sys.executable, "-m", "polyreme.cli.main", "run", *words],
        capture_output=True, text=True, timeout=100, cwd=cwd, input=stdin, env={**os.environ, **env}, check=False,
    )  # fmt: skip


def test_argv_main_siblings_and_exit_code(tmp_path):
    (tmp_path / "sibling.py").write_text("import paddle\nvalue = paddle.__name__\n")
    (tmp_path / "script.py").write_text(
        "import sys, sibling, paddle, polyreme\n"
        "print(sys.argv[1:], __name__, sibling.value, paddle is polyreme, 'jax' in sys.modules)\n"
        "sys.exit(7)\n"
    )
    done = run(str(tmp_path / "script.py"), "--debug", "a b", "--", "run", cwd="/")
    assert done.stdout == "['--debug', 'a b', '--', 'run'] __main__ polyreme True False\n"
    assert (done.stderr, done.returncode) == ("", 7)


def test_modules_packages_standard_input_and_a_command(tmp_path):
    package = tmp_path / "trainer"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "data.py").write_text("import paddle\nname = paddle.__name__\n")
    (package / "__main__.py").write_text("import sys\nfrom .data import name\nprint(name, __name__, sys.argv[1:])\n")
    assert run("-m", "trainer", "-x", cwd=tmp_path).stdout == "polyreme __main__ ['-x']\n"
    assert run("-", "1", cwd=tmp_path, stdin="import paddle, sys\nprint(sys.argv)\n").stdout == "['-', '1']\n"
    assert run("-W", "error", "-c", "import paddle; print(paddle.__name__)", cwd=tmp_path).stdout == "polyreme\n"
    launched = run("-m", "paddle.distributed.launch", "--help", cwd=tmp_path)
    assert launched.stdout.startswith("Usage: polyreme launch")


def test_a_traceback_is_the_scripts_own(tmp_path):
    (tmp_path / "script.py").write_text("import paddle\n\ndef f():\n    raise ValueError('mine')\n\nf()\n")
    done = run("script.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        'Traceback (most recent call last):\n'
        f'  File "{tmp_path}/script.py", line 6, in <module>\n    f()\n'
        f'  File "{tmp_path}/script.py", line 4, in f\n    raise ValueError(\'mine\')\n'
        'ValueError: mine\n'
    )  # fmt: skip


def test_a_missing_name_is_explained_below_the_traceback(tmp_path):
    done = run("-c", "from paddle.nn import cross_entropy", cwd=tmp_path)
    assert "cannot import name 'cross_entropy' from 'polyreme.nn'" in done.stderr
    assert done.stderr.endswith("PaddlePaddle has cross_entropy in paddle.nn.functional; so does polyreme\n")


def test_it_wins_over_an_installed_paddle_in_children_too(tmp_path):
    installed = tmp_path / "site" / "paddle"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("print('the other one')\n")
    (tmp_path / "script.py").write_text(
        "import multiprocessing, subprocess, sys, paddle\n"
        "def child(queue):\n"
        "    queue.put(paddle.__name__)\n"
        "if __name__ == '__main__':\n"
        "    print(paddle.__name__)\n"
        "    for method in ('spawn', 'forkserver', 'fork'):\n"
        "        context = multiprocessing.get_context(method)\n"
        "        queue = context.Queue()\n"
        "        process = context.Process(target=child, args=(queue,))\n"
        "        process.start(); print(method, queue.get(timeout=60)); process.join()\n"
        "    asked = [sys.executable, '-c', 'import paddle.io; print(paddle.io.__name__)']\n"
        "    print(subprocess.run(asked, capture_output=True, text=True).stdout, end='')\n"
    )
    done = run("script.py", cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert done.stdout.split() == [
        "polyreme", "spawn", "polyreme", "forkserver", "polyreme", "fork", "polyreme", "polyreme.io",
    ]  # fmt: skip
    assert done.stderr == ""


@pytest.mark.slow
def test_ranks_that_launch_starts_have_it_too(tmp_path):
    (tmp_path / "script.py").write_text(
        "import paddle\n"
        "import paddle.distributed as dist\n"
        "dist.init_parallel_env()\n"
        "x = paddle.to_tensor([dist.get_rank() + 1.0])\n"
        "dist.all_reduce(x)\n"
        "print('sum', x.item())\n"
    )
    done = run(
        "-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", "logs", "script.py", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout + "".join(p.read_text() for p in (tmp_path / "logs").rglob("*") if p.is_file())
    assert "sum 3.0" in said


def test_options_that_hide_it_are_refused(capsys):
    for option in ("-I", "-E", "-uE"):
        assert main(["run", option, "script.py"]) == 2
        assert "-E and -I hide PYTHONPATH, by which scripts find polyreme" in capsys.readouterr().err


def test_help_shows_usage(capsys):
    assert main(["run", "--help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: polyreme run [PYTHON OPTION]... SCRIPT [ARGUMENT]...")


def test_the_environment_names_the_folder_once():
    once = environment({"PYTHONPATH": "/a"})
    assert once["PYTHONPATH"] == f"{FOLDER}{os.pathsep}/a"
    assert environment(once) == once
