"""Which files are trained on and which are held out.

Run: pytest tests/quickstart/test_text_files.py.
"""

import pytest

from examples.quickstart.text import check_text_folder


def write_files(folder, num_files=120, text="some text\n"):
    for i in range(num_files):
        path = folder / f"part_{i % 3}" / f"{i:03}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


def test_the_held_out_files_depend_on_relative_paths_alone(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    here = check_text_folder(write_files(tmp_path / "here"))
    there = check_text_folder(write_files(tmp_path / "there", text="other text, longer\n"))
    assert here.eval == there.eval
    assert len({*here.train, *here.eval}) == len(here.train) + len(here.eval) == 120
    assert here.train == tuple(sorted(here.train))
    # Written down, so that a changed rule shows: it would let a new group train on old held-outs.
    assert here.eval == (
        "part_1/052.txt",
        "part_1/061.txt",
        "part_1/079.txt",
        "part_1/103.txt",
        "part_2/116.txt",
    )


def test_more_files_leave_the_held_out_ones_held_out(tmp_path):
    before = check_text_folder(write_files(tmp_path, num_files=120))
    after = check_text_folder(write_files(tmp_path, num_files=180))
    assert set(before.eval) <= set(after.eval)


def test_text_is_taken_whatever_its_suffix_and_the_rest_is_left(tmp_path):
    (tmp_path / "a.md").write_text("grüße\n")
    (tmp_path / "b").write_text("no suffix\n")
    # The cut after 64 KiB goes through the middle of a two-byte character.
    (tmp_path / "long.txt").write_text("x" + "ü" * 40_000)
    (tmp_path / "image.txt").write_bytes(b"\xff\xd8\xff")
    (tmp_path / "zeros.txt").write_bytes(b"text\0text")
    (tmp_path / "cut.txt").write_bytes("ü".encode()[:1])
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".hidden").write_text("hidden\n")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden\n")
    folder = check_text_folder(tmp_path)
    assert sorted(folder.train + folder.eval) == ["a.md", "b", "long.txt"]


def test_the_standard_library_is_python_source_without_tests_or_packages():
    folder = check_text_folder()
    names = folder.train + folder.eval
    assert "argparse.py" in names
    assert all(name.endswith(".py") for name in names)
    assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in names)
    assert folder.num_bytes("train") > 5e6
    assert 0.01 < folder.num_bytes("eval") / folder.num_bytes("train") < 0.1


@pytest.mark.parametrize(
    ("name", "num_files", "message"),
    [
        ("nowhere", 0, "nowhere' does not exist. Pass a folder"),
        ("image.png", 0, "image.png' is not a folder"),
        ("", 0, "holds 0 text files. At least 2"),
        ("", 1, "holds 1 text files. At least 2"),
    ],
)
def test_what_is_no_folder_of_two_text_files_is_refused(tmp_path, name, num_files, message):
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0")
    write_files(tmp_path, num_files=num_files)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        check_text_folder(tmp_path / name)


def test_a_split_shorter_than_one_sample_is_refused(tmp_path):
    write_files(tmp_path, num_files=2, text="ten bytes\n")
    assert check_text_folder(tmp_path, max_seq_len=9)
    with pytest.raises(ValueError, match="leaves 10 bytes .* needs max_seq_len . 1 = 11"):
        check_text_folder(tmp_path, max_seq_len=10)


def test_more_text_than_memory_should_hold_is_refused_before_it_is_read(tmp_path):
    write_files(tmp_path)
    with (tmp_path / "big.txt").open("w") as file:
        file.write("x" * 100_000)
        file.truncate(2 << 30)  # sparse: takes no space
    with pytest.raises(ValueError, match="the limit is 1073741824. Use a part"):
        check_text_folder(tmp_path)


def test_an_unknown_split_is_refused(tmp_path):
    with pytest.raises(ValueError, match="split='test' is unknown. Use 'train' or 'eval'"):
        check_text_folder(write_files(tmp_path)).read_bytes("test")  # pyright: ignore[reportArgumentType]
