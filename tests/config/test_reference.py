from rayrm.config.reference import describe_fields, dotted_fields, list_fields, type_in_words


def test_every_field_has_a_sentence():
    listed = [line.split() for line in list_fields(of_sweep=True).splitlines()]
    for path, _ in dotted_fields():
        sentences = [words[1:] for words in listed if words and words[0] == path]
        assert sentences
        assert all(sentences), path


def test_the_fields_of_a_run_leave_out_the_search():
    assert "search." not in list_fields() + describe_fields()
    assert "search.space" in describe_fields(of_sweep=True)


def test_the_reference_names_type_default_and_sentence():
    reference = " ".join(describe_fields().split())
    assert "train.batch_size whole number >= 1 (default: 32) Pairs an optimizer step" in reference
    assert 'model.lora.target_modules text or list of text (default: "all-linear")' in reference


def test_types_read_as_words():
    words = {path: type_in_words(field) for path, field in dotted_fields()}
    assert words["run.resume"] == "one of auto, never, must"
    assert words["loss.label_smoothing"] == "number >= 0 and < 0.5"
    assert words["data.train"] == (
        "text or {path, split, name, limit} or list of (text or {path, split, name, limit})"
    )
    assert words["scaling.resources_per_worker"] == ("mapping of names to number >= 0 or null")
    assert words["zero.extra"] == "mapping of names to any value"
