"""One way to replace a file."""
import threading

from mindspeed_swap.files import replace_file


def test_two_writers_of_the_same_file(tmp_path):
    """Jobs may share a folder of plans: each write is whole, and none fails because of the other."""
    path, failures = tmp_path / "folder" / "plan.json", []
    texts = ["a" * 100_000, "b" * 50_000]

    def write(text):
        try:
            for _ in range(200):
                replace_file(path, text)
                assert path.read_text() in texts
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and [file.name for file in path.parent.iterdir()] == ["plan.json"]
