"""Every sentence of SECURITY.md that claims something is held by tests; those that claim nothing
which a test could hold are listed with the reason."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")

ROWS = "test_network.py::test_programs_that_look_at_data_or_a_run_listen_nowhere"
# a piece of a sentence -> tests, in files below tests/
HELD = {
    # -- whom you have to trust: a data set
    "it is decoded within limits of bytes and seconds": """
        data/test_bombs.py::test_what_stands_for_gigabytes_is_not_held_in_memory
        data/test_bombs.py::test_an_image_that_takes_too_long_is_too_slow
        data/test_bombs.py::test_a_sound_is_limited_in_samples_and_in_seconds_of_decoding
        data/test_bombs.py::test_no_picture_is_decoded_before_a_stream_is_chosen""",
    "nothing in it is run, extracted or followed out of its folders": """
        data/test_regions.py::test_a_pickle_calls_nothing
        common/test_files.py::test_one_place_writes_and_removes
        data/test_roots.py::test_nothing_outside_the_roots_is_opened
        data/test_classes.py::test_a_list_of_names_is_not_read_through_a_link_that_leads_out
        data/test_audio.py::test_a_playlist_opens_no_other_file""",
    # weights
    "pickles are read by torch's restricted loader": """
        launch/test_strangers.py::test_every_call_that_could_run_code_of_a_file_says_that_it_does_not
        test_network.py::test_nothing_that_ranks_tell_each_other_is_unpickled""",
    "a model's own code (`trust_remote_code`) is never run": """
        launch/test_strangers.py::test_every_call_that_could_run_code_of_a_file_says_that_it_does_not
        launch/test_strangers.py::test_a_configuration_names_no_code_of_the_hub
        data/test_tokenizer.py::test_code_that_a_tokenizer_brings_along_is_not_run""",
    # a run's folder, an export, embeddings, a report
    "modules that a run names are imported only with `--import-module NAME` or `--trust-run`": """
        launch/test_strangers.py::test_modules_that_a_record_names_are_not_imported
        launch/test_strangers.py::test_embeddings_name_their_data_and_it_is_not_opened
        launch/test_strangers.py::test_one_flag_allows_them""",
    "`launch.tools.submit` runs a `code` in it": """
        launch/test_submit.py::test_a_job_runs_no_code_of_a_stranger
        launch/test_submit.py::test_a_job_keeps_the_code_and_the_configuration""",
    "`export.py --wandb` sends to a project or a team": """
        launch/test_tracking.py::test_a_folder_of_a_stranger_sends_an_export_nowhere""",
    "a report imports nothing": """
        launch/test_strangers.py::test_a_timeline_of_a_run_imports_nothing""",
    "nothing is written or removed through links": """
        common/test_files.py::test_one_place_writes_and_removes
        common/test_files.py::test_a_link_is_replaced_and_not_followed
        common/test_files.py::test_evaluating_a_strangers_run_writes_in_it_alone
        launch/test_shell.py::test_no_line_touches_what_lies_in_a_runs_folder
        launch/test_supervise.py::test_files_of_a_run_that_are_links_or_pipes_lead_nowhere""",
    "which makes only classes and passes only arguments of its lists": """
        launch/test_strangers.py::test_the_loader_of_exports_makes_no_class_that_the_record_alone_names
        launch/test_strangers.py::test_the_loader_of_exports_calls_nothing_that_the_record_alone_names
        launch/test_strangers.py::test_the_lists_of_the_loader_are_those_of_the_libraries""",
    # a model of --import, a recipe
    "an export sets what the model is and what enters it": """
        launch/test_strangers.py::test_an_export_decides_nothing_but_its_model
        launch/test_strangers.py::test_what_an_export_says_is_read_as_on_the_command_line""",
    "all else is passed over with a line": """
        launch/test_strangers.py::test_an_export_decides_nothing_but_its_model""",
    "its towers and tokenizer lie in its folder": """
        launch/test_strangers.py::test_towers_and_tokenizers_of_an_export_lie_in_it""",
    "it sets the flags of a list and DeepSpeed's keys but those that say where metrics go": """
        launch/test_strangers.py::test_a_recipe_cannot_set_what_only_the_command_line_may""",
    "modules need `--import-module` on the command line": """
        launch/test_strangers.py::test_a_recipe_cannot_set_what_only_the_command_line_may""",
    # the network
    "On one node all ranks listen on loopback": """
        test_network.py::test_a_stranger_reaches_nothing_and_ends_no_run
        engine/test_processes.py::test_ranks_of_one_node_under_an_agent_meet_where_no_other_machine_is""",
    "`torchrun`'s agent and Ray listen on all interfaces": """
        engine/test_processes.py::test_ranks_of_one_node_under_an_agent_meet_where_no_other_machine_is""",
    "Limits of decoding bound memory and time": """
        data/test_bombs.py::test_what_stands_for_gigabytes_is_not_held_in_memory
        data/test_bombs.py::test_an_image_that_takes_too_long_is_too_slow""",
    # -- what is refused
    "Code that a file names and the command line does not": """
        launch/test_strangers.py::test_modules_that_a_record_names_are_not_imported
        launch/test_strangers.py::test_the_loader_of_exports_makes_no_class_that_the_record_alone_names
        launch/test_submit.py::test_a_job_runs_no_code_of_a_stranger
        launch/test_supervise.py::test_a_name_of_a_checkpoint_that_is_none_runs_nothing_and_is_not_shown""",
    "links, names with `..`, files with a second name": """
        common/test_files.py::test_a_link_is_replaced_and_not_followed
        common/test_files.py::test_what_leads_out_of_a_folder_is_refused
        common/test_files.py::test_a_file_grows_only_where_it_is_one_of_its_own
        common/test_files.py::test_a_run_folder_with_links_is_refused_before_work""",
    "`common/files.py` is the only place that writes": """
        common/test_files.py::test_one_place_writes_and_removes
        launch/test_shell.py::test_no_line_touches_what_lies_in_a_runs_folder""",
    "Archives, images, sounds, tables, captions and patterns of file names": """
        data/test_bombs.py::test_what_stands_for_gigabytes_is_not_held_in_memory
        data/test_bombs.py::test_a_tiff_of_millions_of_strips_is_not_unpacked
        data/test_bombs.py::test_a_sound_is_limited_in_samples_and_in_seconds_of_decoding
        data/test_bombs.py::test_a_table_of_ever_the_same_short_row_ends
        data/test_bombs.py::test_texts_of_an_image_are_limited""",
    "They are bad samples, each with its reason": """
        data/test_bombs.py::test_what_stands_for_gigabytes_is_not_held_in_memory
        data/test_bombs.py::test_links_to_themselves_and_folders_without_end_are_bad_samples""",
    "a pattern of too many names is an error": """
        data/test_bombs.py::test_braces_are_counted_before_they_are_expanded""",
    "a footer, a `sizes.json` or a file of keys": """
        data/test_bombs.py::test_a_footer_says_no_more_rows_than_can_be_there
        data/test_bombs.py::test_a_footer_of_gigabytes_is_not_read
        data/streams/test_counts.py::test_a_file_of_counts_tells_no_more_than_its_shard_can_hold
        data/streams/test_filters.py::test_a_bloom_file_says_no_more_hashes_than_there_can_be""",
    "a list that holds itself": """
        data/test_regions.py::test_a_pickle_calls_nothing""",
    "a body that is longer than its server announced": """
        data/streams/test_store.py::test_no_more_is_read_than_was_announced
        data/streams/test_source.py::test_a_shard_that_is_longer_than_announced_fills_no_cache""",
    "They are errors that name the file": """
        data/test_bombs.py::test_a_footer_says_no_more_rows_than_can_be_there
        data/test_bombs.py::test_a_footer_of_gigabytes_is_not_read
        data/streams/test_counts.py::test_a_file_of_counts_tells_no_more_than_its_shard_can_hold
        data/streams/test_filters.py::test_a_bloom_file_says_no_more_hashes_than_there_can_be
        data/test_regions.py::test_a_pickle_calls_nothing
        data/streams/test_store.py::test_no_more_is_read_than_was_announced""",
    "What is read as a whole is read up to a limit": """
        data/test_bombs.py::test_files_that_are_read_whole_are_measured_first""",
    "of a value no more is made than a message shows": """
        common/test_shown.py::test_no_more_of_a_value_is_made_than_is_shown
        common/test_shown.py::test_values_of_others_are_shown_by_brief""",
    "Configurations of models with sizes that no model has": """
        launch/test_sizes_of_strangers.py::test_of_transformers
        launch/test_sizes_of_strangers.py::test_of_open_clip""",
    "fewer tensors than (over 100) layers, or no side as long as a width over 8,192": """
        launch/test_sizes_of_strangers.py::test_what_is_ordinary_may_be_more_than_its_weights_have
        launch/test_sizes_of_strangers.py::test_of_transformers""",
    "Before anything is built of it, each `config.json`": """
        launch/test_sizes_of_strangers.py::test_of_transformers
        launch/test_sizes_of_strangers.py::test_of_open_clip
        launch/test_sizes_of_strangers.py::test_of_a_feature_extractor
        launch/test_sizes_of_strangers.py::test_of_an_export
        launch/test_sizes_of_strangers.py::test_of_a_run
        launch/test_sizes_of_strangers.py::test_of_a_tower_by_name""",
    "reads the headers of safetensors files and nothing else of them": """
        launch/test_sizes_of_strangers.py::test_weights_that_are_not_whole_bound_nothing_and_a_header_is_read_bounded""",
    "`modeling_export.py` has a check of its own": """
        launch/test_sizes_of_strangers.py::test_the_loader_of_exports
        launch/test_sizes_of_strangers.py::test_the_loader_makes_no_module_of_more_values_than_its_weights""",
    "A folder without the vocabulary of a tokenizer is refused": """
        launch/test_whole_models.py::test_a_model_without_its_tokenizer_is_refused
        launch/test_sizes_of_strangers.py::test_the_loader_of_exports
        data/test_tokenizer.py::test_a_tokenizer_that_transformers_makes_up_is_refused""",
    "`modeling_clips.py` opens films alone, no playlists, and up to 2,000,000 frames": """
        launch/test_sizes_of_strangers.py::test_the_loader_of_clips_opens_films_alone_and_so_many_frames""",
    "counts the steps of each one of the code": """
        common/test_patterns.py::test_no_pattern_takes_four_times_the_steps_for_twice_the_text
        common/test_patterns.py::test_steps_are_counted""",
    "Control characters in what is printed": """
        common/test_output.py::test_what_a_terminal_would_obey_is_shown_in_escapes
        common/test_output.py::test_every_program_outlives_its_output
        common/test_shown.py::test_a_program_shows_what_it_is_given_escaped
        common/test_shown.py::test_a_terminal_gets_no_command_of_others""",
    "Text in model cards and reports stays text": """
        common/test_shown.py::test_text_stays_in_its_place_of_a_document
        launch/test_strangers.py::test_a_page_of_an_export_shows_what_a_run_says_as_text
        launch/test_reporting.py::test_what_a_run_says_is_text_of_its_page
        launch/test_reporting_in_browser.py::test_what_captions_say_is_text""",
    "Credentials in what is shown, recorded or sent": """
        launch/test_run_folder.py::test_no_record_of_a_run_holds_the_credentials_of_an_address
        launch/test_tracking.py::test_offline_writes_below_the_run_folder_and_goes_on_as_the_same_run
        common/test_shown.py::test_values_of_secrets_in_the_environment_are_not_shown""",
    "the user part and the query values of addresses": """
        common/test_shown.py::test_addresses_lose_their_credentials""",
    "values of environment variables named like a key, token, secret or password": """
        common/test_shown.py::test_values_of_secrets_in_the_environment_are_not_shown""",
    "give an address that is signed in a file of arguments": """
        common/test_command_line.py::test_a_file_has_an_argument_on_each_line_as_it_stands
        common/test_command_line.py::test_a_file_of_arguments_arrives_on_other_hosts_as_it_was_typed""",
    "a run that goes on and `evaluate.py` need the address again": """
        data/test_formats.py::test_credentials_of_addresses_are_kept_nowhere
        data/streams/test_source.py::test_specs_that_break_a_rule""",
    "Redirects of an encrypted address to one that is not (https to http), and circles of them": """
        data/streams/test_store.py::test_redirects_are_bounded""",
    "Others are followed": """
        data/streams/test_store.py::test_redirects_are_bounded""",
    "Line breaks in what becomes a line of a job": """
        launch/test_submit.py::test_no_word_becomes_a_line_of_the_job_or_an_option_of_ssh
        launch/test_submit.py::test_a_job_of_kubernetes_holds_any_text""",
    "names of hosts that ssh would take for options": """
        launch/test_submit.py::test_no_word_becomes_a_line_of_the_job_or_an_option_of_ssh
        launch/test_supervise.py::test_a_host_that_ssh_would_take_for_an_option_is_refused
        launch/test_doctor.py::test_a_wrong_hostfile""",
    "prints the whole command when it starts and when it fails": """
        test_faults.py::test_ctrl_c_in_a_terminal_saves_before_the_launcher_ends_the_ranks""",
    # -- what listens
    "hold the rows of `train.py`, `evaluate.py`, `export.py`": """
        test_network.py::test_a_stranger_reaches_nothing_and_ends_no_run
        test_network.py::test_programs_that_look_at_data_or_a_run_listen_nowhere
        engine/test_processes.py::test_ranks_of_one_node_under_an_agent_meet_where_no_other_machine_is""",
    "the store of the ranks, and gloo in each of them | nothing": """
        test_network.py::test_a_stranger_reaches_nothing_and_ends_no_run
        test_network.py::test_programs_that_look_at_data_or_a_run_listen_nowhere""",
    "the store of torchrun's agent | loader processes": """
        engine/test_processes.py::test_ranks_of_one_node_under_an_agent_meet_where_no_other_machine_is""",
    "W&B's client (`wandb-core`)": ROWS,
    "`data.inspect` |": ROWS,
    "`evaluate.py` |": ROWS,
    "`export.py`, `launch.tools.report` |": ROWS,
    "`launch.tools.doctor` |": f"""{ROWS}
        test_network.py::test_ranks_whose_links_the_doctor_measures_listen_on_loopback
        launch/test_doctor.py::test_a_taken_port""",
    "Ray's servers (`gcs_server`, `raylet`)": """
        test_ray.py::test_a_cluster_of_ones_own_listens_everywhere""",
    "Variables that are set, such as `GLOO_SOCKET_IFNAME`": """
        engine/test_processes.py::test_ranks_of_several_nodes_listen_where_a_way_leads_to_the_others""",
}

# the beginning of a sentence -> why no test could hold it
CLAIMS_NOTHING = {
    "What you have to trust to use Wye": "says what the page is about",
    "Importing the `modeling_export.py` of an export runs its code": "what Python does, as a warning",
    "a DeepSpeed JSON file and the command line": "whose these are",
    "a `python:` data set, a module of `--import-module`": "whose these are",
    "the network between nodes": "a warning: ranks of several nodes have no password",
    "See *Several nodes*": "leads to a page",
    "a parser that is written in C": "a warning",
    "Keep these packages up to date": "advice",
    "Within these limits a model that is started from scratch": "a warning",
    "Keep credentials in the environment": "advice",
    "Found by starting each program on one machine": "how the table was made",
    "one agent on the machine's own address": "of Ray, see its row",
    "Report it privately": "a request",
    "Please do not open a public issue": "a request",
}


def sentences() -> Iterator[str]:
    """Of paragraphs, items of lists and rows of tables; a semicolon ends one, too."""
    for block in re.split(r"\n\s*\n", PAGE):
        if block.startswith("#"):
            continue
        if block.startswith("|"):
            rows = [line.strip("| ").split("|") for line in block.splitlines()[2:]]
            parts = [" | ".join(map(str.strip, row)) for row in rows]
        else:
            parts = re.split(r"^- ", block, flags=re.M)
        for part in parts:
            yield from filter(None, re.split(r"(?<=[.;])\s+", " ".join(part.split())))


@cache
def functions_of(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_sentence_is_held_or_claims_nothing():
    said = list(sentences())
    assert len(said) > 50
    unheld = [each for each in said if not any(piece in each for piece in (*HELD, *CLAIMS_NOTHING))]
    assert not unheld, "name the tests of these in HELD, or say in CLAIMS_NOTHING why there is none"


def test_every_piece_is_of_one_sentence():
    gone = [piece for piece in HELD if sum(piece in each for each in sentences()) != 1]
    gone += [
        piece
        for piece in CLAIMS_NOTHING
        if not any(each.startswith(piece) or f"| {piece}" in each for each in sentences())
    ]
    assert not gone


def test_every_test_that_is_named_is_there():
    named = {name for names in HELD.values() for name in names.split()}
    missing = []
    for name in sorted(named):
        file, _, test = name.partition("::")
        if not (ROOT / "tests" / file).is_file() or test not in functions_of(ROOT / "tests" / file):
            missing.append(name)
    assert not missing


def test_every_file_and_name_of_the_code_is_there():
    """That the page mentions."""
    paths = re.findall(r"`((?:common|data|engine|launch|models|tests)/[\w/]+\.(?:py|md))`", PAGE)
    assert len(paths) > 8 and all((ROOT / path).is_file() for path in paths)
    for name, file in re.findall(r"`(\w+)` in\s+`([\w/]+\.py)`", PAGE):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^(def )?{name}\b", text, re.M), f"{name} in {file}"
    for heading in ("Several nodes",):
        assert f"\n### {heading}\n" in (ROOT / "launch/README.md").read_text(encoding="utf-8")
