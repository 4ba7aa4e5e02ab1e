"""Settings every test shares: the Hypothesis profile of the CI sample, one BLAS thread, and how
many workers."""

import gc
import os
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy  # noqa: F401 - loads the BLAS that is limited below
import pytest
import threadpoolctl
from hypothesis import HealthCheck, settings

from minidist.device import account
from minidist.errors import KernelError
from minidist.kernels import cache
from minidist.launch.launchers import clean_environment

# Where this is set, each of the hundreds of Pythons that tests start would compile all of minidist
# again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What is printed into a pipe is looked at, so nobody's taste in colours, nor the width of a
# terminal, may be in it.
for _name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
    os.environ.pop(_name, None)

# Started with `&` or nohup, Ctrl-C is ignored, also by the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# OpenBLAS starts its threads as it is loaded: 30 ms of each Python that a test starts, and its
# ranks share two cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# On a cluster's node a test is no rank of the job in which pytest was started.
for _name in set(os.environ) - set(clean_environment(os.environ)):
    del os.environ[_name]

# Built kernels are the user's, so that nobody builds them twice; of a user who can keep none, a
# temporary folder's.
try:
    cache.folder().mkdir(parents=True, exist_ok=True)
    _kept = os.access(cache.folder(), os.W_OK)
except (OSError, KernelError):
    _kept = False
if not _kept:
    os.environ["XDG_CACHE_HOME"] = str(Path(tempfile.gettempdir(), f"minidist-tests-{os.getuid()}"))

# `from helpers import ...`; ranks under mpirun find it too
sys.path.insert(0, str(Path(__file__).parent / "support"))

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=15,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci")

# many small products, and ranks as threads: BLAS threads of their own only wait
threadpoolctl.threadpool_limits(1)

MOST_WORKERS = 8  # many tests start several processes themselves
# tests also sleep and wait: with 1 the two cores are idle for a seventh of the time
SPARE_WORKERS = 2


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Plain `pytest` takes a worker (`-n`) a core and SPARE_WORKERS; CONTRIBUTING.md says when
    there are none.

    A worker steals tests from another that has more to do; tests of one file mostly stay with one
    worker.
    """
    option = config.option
    chosen = option.keyword or getattr(option, "lf", False)  # no `lf` under -p no:cacheprovider
    whole = all(Path(argument).is_dir() for argument in config.args) and not chosen
    usual = option.markexpr in config.getini("addopts")
    looking = option.usepdb or option.capture == "no"
    free = (
        getattr(option, "numprocesses", 0) is None
        and option.dist == "no"
        and not hasattr(config, "workerinput")
    )
    if free and whole and usual and not looking:
        workers = len(os.sched_getaffinity(0)) + SPARE_WORKERS
        option.numprocesses = min(MOST_WORKERS, workers)
        option.dist = "worksteal"


SAMPLED = {
    # lessons
    "test_a_wrong_filling_fails_under_its_name": 32,
    "test_another_right_answer_passes": 2,
    "test_break_it": 20,
    "test_break_it_in_processes": 3,
    "test_the_figure_is_drawn_from_a_run": 2,
    "test_under_mpirun": 11,
    # launchers and transports
    "test_a_child_of_a_rank_may_not_use_its_group": 2,
    "test_a_child_that_a_rank_forks_ends_without_a_word": 2,
    "test_a_death_under_mpirun_ends_the_job_and_is_named": 2,
    "test_a_killed_rank_is_named_everywhere_at_once": 4,
    "test_a_limit_ends_a_wait_and_the_job_goes_on": 2,
    "test_a_long_array_goes_round_the_ring_in_stretches": 2,
    "test_a_rank_killed_in_any_phase_is_named_by_all": 11,
    "test_a_rank_that_dies_is_named_once_and_by_each_survivor": 4,
    "test_a_rank_that_dies_is_named_with_how_it_went": 8,
    "test_a_rank_that_hangs_after_its_goodbye_ends_the_job": 2,
    "test_a_send_that_is_being_taken_is_not_in_vain": 2,
    "test_abort_ends_every_wait": 4,
    "test_all_demands_on_two_ranks": 2,
    "test_an_algorithm_takes_as_long_as_its_path_says": 5,
    "test_an_order_of_bytes_is_kept": 2,
    "test_any_job": 2,
    "test_bad_input_before_init_is_one_line_and_nobody_waits": 2,
    "test_every_survivor_of_eight_learns_it_at_once": 4,
    "test_every_verb": 3,
    "test_no_file_stays_open_and_memory_has_no_name": 3,
    "test_one_demand": 5,
    "test_one_failing_rank_ends_all_with_its_name": 4,
    "test_random_mismatches_are_caught": 2,
    "test_random_traffic": 3,
    "test_told_to_stop_or_killed_it_leaves_no_rank_on_any_host": 3,
    "test_ranks_that_wait_in_vain_learn_why": 3,
    "test_results_come_in_rank_order": 3,
    "test_split_by_any_colors_and_keys": 2,
    "test_table_figure_and_json": 2,
    "test_the_first_failure_keeps_its_type_and_names_its_rank": 6,
    "test_the_job_goes_on_without_it": 3,
    "test_the_program_prints_the_sum_on_every_rank": 4,
    "test_the_promises_of_a_transport": 3,
    "test_what_cannot_work_is_a_launch_error": 6,
    "test_what_it_had_sent_still_arrives": 2,
    # verbs, commands and their refusals
    "test_a_command_whose_output_goes_nowhere": 2,
    "test_a_damaged_checkpoint_is_told_and_the_one_before_is_taken": 2,
    "test_a_full_disk": 2,
    "test_a_mismatch_shows_both_calls": 5,
    "test_a_mistake_is_one_line": 2,
    "test_a_path_is_a_share_of_what_all_ranks_send": 5,
    "test_all_reduce": 3,
    "test_an_unwritable_json_is_refused_before_the_work": 4,
    "test_another_algorithm": 5,
    "test_another_dtype_of_the_same_size": 5,
    "test_both_ends_keep_the_same_message": 4,
    "test_calls_alike_in_another_order_are_warned_of": 2,
    "test_every_two_ranks_are_connected": 2,
    "test_mutant_is_caught": 3,
    "test_no_colour_at_any_width": 3,
    "test_numbers_and_names_that_are_too_large_are_one_line": 3,
    "test_same_bits_by_every_algorithm": 3,
    "test_shared_memory": 2,
    "test_the_plan_says_which_numbers_of_ranks_are_possible": 3,
    "test_threads_of_one_process_on_busy_cores_are_told_once": 3,
    "test_validate_bounds_the_held_out_text": 2,
    "test_what_cannot_fit_is_refused_before_anything_is_made": 3,
    "test_workspace_is_as_stated": 3,
    "test_wrong_options_are_refused_in_a_line": 2,
    # models and strategies
    "test_a_block_computes_while_four_fifths_of_bytes_are_under_way": 4,
    "test_a_lost_server_is_named": 3,
    "test_a_pass_too_large_is_told_before_training": 5,
    "test_a_rank_holds_the_share_of_its_copy": 2,
    "test_a_step_of_bf16_waits_for_nothing": 4,
    "test_a_step_returns_while_weights_travel_and_a_reader_waits": 2,
    "test_a_straggler_holds_the_others_up_no_more_than_it_must": 3,
    "test_activations_are_those_of_the_microbatches_held": 3,
    "test_ahead_limits_what_is_in_flight": 2,
    "test_an_evaluation_takes_no_more_than_a_step": 4,
    "test_an_overflow_on_one_rank_is_skipped_by_all": 5,
    "test_blocks_computed_again_send_tokens_twice_more": 2,
    "test_by_a_kernel": 2,
    "test_bytes_a_parameter": 4,
    "test_bytes_and_messages_are_the_formula": 3,
    "test_bytes_are_the_formula": 11,
    "test_bytes_by_axis": 3,
    "test_composed_plans_equal_one_process": 5,
    "test_data_times_experts": 2,
    "test_equals_one_process": 6,
    "test_equals_one_process_after_twenty_steps": 2,
    "test_equals_one_process_on_every_transport": 3,
    "test_equals_one_process_on_the_cpu": 5,
    "test_equals_the_replay": 5,
    "test_every_rank_holds_the_formula": 7,
    "test_experts_times_tensor": 2,
    "test_float32_after_twenty_steps": 3,
    "test_half_precision": 2,
    "test_key_heads_that_several_ranks_need": 2,
    "test_layers_over_ranks": 2,
    "test_loss_gradient_against_finite_differences": 5,
    "test_loss_picture": 2,
    "test_low_precision_is_float32_rounded_once": 9,
    "test_masters_begin_as_they_were_drawn": 3,
    "test_memory_by_role": 5,
    "test_mixed_precision": 4,
    "test_moves_by_the_formulas": 5,
    "test_nothing_is_left_of_a_run_that_is_ended": 2,
    "test_passes_are_added_up_with_a_rounding_each": 5,
    "test_ranks_equal_each_other_and_nearly_one_process": 5,
    "test_ranks_that_use_different_parameters": 4,
    "test_ranks_use_one_process_s_scales": 5,
    "test_ranks_without_a_row_take_part": 2,
    "test_same_bits_as_without": 12,
    "test_same_bits_on_every_transport": 4,
    "test_stages_together_are_the_model": 3,
    "test_static_buckets_follow_the_first_step": 4,
    "test_summed_in_float32_and_rounded_once": 5,
    "test_the_peak_is_known_beforehand": 5,
    "test_the_same_bits_on_every_transport": 2,
    "test_the_same_run_over_threads_and_over": 2,
    "test_the_same_weights": 3,
    "test_through_the_trainer": 2,
    "test_traffic": 5,
    "test_traffic_is_the_formula": 4,
    "test_training_equals_one_process": 5,
    "test_uneven_splits": 3,
    "test_who_waits_for_what_it_starts_is_seen": 5,
    "test_within_five_percent_of_tracemalloc": 2,
    # checkpoints
    "test_a_checkpoint_of_another_model_is_refused": 2,
    "test_a_rank_killed_while_a_save_is_under_way": 2,
    "test_a_rank_reads_what_it_wants": 2,
    "test_a_slow_disk_on_one_rank_is_no_deadlock_and_holds_up_no_step": 2,
    "test_a_users_own_module": 4,
    "test_goes_on_as_one_process": 3,
    "test_later_updates_do_not_touch_the_copy": 5,
    "test_the_same_bits_as_undisturbed": 4,
    "test_what_goes_on_is_the_replay_of_the_changes": 6,
    "test_planted_bugs_in_a_meeting_are_seen": 3,
    "test_planted_bugs_of_servers_are_seen": 3,
    "test_another_number_of_ranks_goes_on": 3,
    # kernels
    "test_an_overflow_anywhere_shows": 2,
    "test_bias_gelu": 3,
    "test_bits": 5,
    "test_blocks_that_see_each_other": 5,
    "test_bytes_read": 5,
    "test_each_version_is_the_reference": 3,
    "test_extreme_scores": 2,
    "test_it_is_the_product": 4,
    "test_swiglu": 3,
    "test_three_steps_are_the_references": 5,
    "test_top_k": 3,
    "test_transposed_as_they_lie": 5,
    # compression and kept activations
    "test_a_meeting_after_each_step_is_ddp": 4,
    "test_a_plan_compresses": 3,
    "test_an_overflow_is_seen_on_every_rank_and_then_forgotten": 21,
    "test_another_plan_owes_as_much": 8,
    "test_between_copies": 10,
    "test_bytes_beside_the_formula": 2,
    "test_bytes_of_a_plan_are_its_formula": 11,
    "test_bytes_of_compressed_outer_gradients": 11,
    "test_bytes_of_predictions": 4,
    "test_diloco_equals_its_formula": 4,
    "test_equals_its_formula": 7,
    "test_everything_sent_is_plain_training": 4,
    "test_fewer_numbers_than_ranks": 29,
    "test_goes_on_with_the_same_bits": 5,
    "test_low_precision": 11,
    "test_nothing_is_lost": 14,
    "test_ranks_stay_equal_and_learn": 14,
    "test_with_tensor_parallelism_and_a_pipeline": 7,
    "test_with_each_axis": 2,
    "test_within_the_budget": 2,
    "test_without_feedback_much_is_lost": 4,
    "test_zero_sums_as_ddp_does": 4,
    # simulation, and diagnosis
    "test_a_gpu_holds_what_its_stand_in_holds": 2,
    "test_a_job_that_ended": 4,
    "test_a_rank_alone_sends_and_holds_what_it_does_among_others": 4,
    "test_all_at_once_is_message_by_message": 29,
    "test_in_a_plan_and_through_a_checkpoint": 6,
    "test_measured_copies_are_those_that_travel": 2,
    "test_the_fast_path_is_near_the_replay": 7,
    "test_why": 5,
    # bugs planted to see them caught
    "test_planted_bugs": 5,
    "test_planted_bugs_break_parity": 8,
    "test_planted_bugs_break_the_replay": 2,
    "test_planted_bugs_in_shared_key_heads": 3,
    "test_planted_mistakes": 14,
    # more of lessons, strategies, kernels and simulation
    "test_a_fault_is_named": 2,
    "test_a_large_bucket_goes_round_in_stretches": 2,
    "test_a_leak_and_a_first_number": 3,
    "test_a_lost_worker_slows_nobody": 2,
    "test_a_mistake_is_named_with_its_line": 4,
    "test_a_plan_needs_no_static": 3,
    "test_activations_are_those_of_one_microbatch": 2,
    "test_an_error_names_the_line_of_the_exercise": 2,
    "test_another_plan_cannot_go_on": 2,
    "test_any_axis_beside_an_offload": 3,
    "test_attention_moves_what_the_story_says": 3,
    "test_attention_over_ranks": 3,
    "test_both_stages_of_zero_make_the_same_bits": 3,
    "test_composed_plans": 2,
    "test_each_version_is_the_product": 3,
    "test_equal_events_are_one_role": 5,
    "test_equals_a_replay_of_the_record": 5,
    "test_equals_causal_attention": 3,
    "test_equals_one_process_under_any_pattern": 3,
    "test_equals_the_paper": 2,
    "test_equals_the_replay_of_its_records": 2,
    "test_heads_over_any_number_of_ranks": 2,
    "test_it_is_the_published_exchange": 5,
    "test_links_that_are_alike_give_the_critical_path": 7,
    "test_local_steps_equal_those_on_the_cpu": 2,
    "test_long_commands_show_what_they_do": 2,
    "test_loss_falls_and_evaluate_agrees_with_step": 2,
    "test_messages_and_bytes_are_those_of_the_formulas": 7,
    "test_no_block_computes_while_one_bucket_is_under_way": 2,
    "test_no_training_takes_less": 4,
    "test_one_place_for_all_through_the_trainer": 2,
    "test_one_rank_has_its_sum": 5,
    "test_ops_take_the_kernel_on_a_gpu_alone": 4,
    "test_other_outer_optimizers": 2,
    "test_other_tokens_break_parity": 2,
    "test_owners_know_what_the_ranks_predict": 3,
    "test_planted_bugs_are_seen": 3,
    "test_ranks_that_did_not_run_do_the_same": 5,
    "test_records_are_no_matter_of_device_memory": 2,
    "test_same_bits_on_all_ranks_and_in_a_second_run": 5,
    "test_same_weights_as_pytorch_after_every_step": 5,
    "test_servers_in_float64_equal_one_process_that_does_the_same": 2,
    "test_shared_memory_in_pieces": 4,
    "test_slow_messages": 3,
    "test_stochastic_rounding_is_right_on_average": 3,
    "test_stochastic_rounding_takes_a_neighbour": 3,
    "test_tensor_parallel_stages_are_as_late": 2,
    "test_the_bubble_is_the_checkers": 5,
    "test_the_clock_that_jumps_keeps_what_the_formula_says": 3,
    "test_the_data_axis_alone": 2,
    "test_the_error_is_at_most_half_a_gap_of_the_book": 3,
    "test_the_measured_timeline_is_the_schedule": 4,
    "test_the_other_byte_order_gives_the_same_values": 5,
    "test_the_other_byte_order_is_refused": 5,
    "test_the_scales_of_fp8_are_those_of_whole_matrices": 2,
    "test_the_table_names_launchers": 4,
    "test_the_two_measures_of_time_in_calls_agree": 3,
    "test_tiles_that_nobody_sees_are_not_read": 2,
    "test_watch_and_diagnose_name_the_same_rank_for_the_same_cause": 7,
    "test_weights_and_optimizer_state_are_divided": 3,
    "test_what_a_layer_keeps_to_be_computed_again_is_shared_by_all_expert_axes": 3,
    "test_what_a_step_holds": 2,
    "test_what_each_axis_sends_is_the_formula": 3,
    "test_what_one_block_more_takes": 3,
    "test_what_the_host_decides_is_seen": 2,
    "test_workers_and_servers_on_different_devices": 3,
    "test_zero_s_ranks_differ_in_their_pieces_alone": 3,
    "test_zero_through_the_trainer": 3,
    # three of nine or of twelve: each size, option or version once
    "test_a_meeting_in_stretches": 4,
    "test_it_trains_as_ddp": 4,
    "test_packed_is_the_same_attention": 8,
}
"""Of these tests' cases the default run takes every n-th, and the soak tests take the others: two
minutes are all there is, and the cases of a test resemble each other."""


SOAK_SECONDS = 1800  # a hundred plans of up to 16 ranks, 20 steps each, take a quarter of an hour


@pytest.hookimpl(tryfirst=True)  # before marks decide
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The cases that are not in the sample are soak tests; a soak test has SOAK_SECONDS."""
    seen: Counter[str] = Counter()
    for item in items:
        test = item.nodeid.split("[")[0]
        step = SAMPLED.get(test.rpartition("::")[2], 1)
        if item.get_closest_marker("soak") is None:
            if seen[test] % step:
                item.add_marker(pytest.mark.soak)
            seen[test] += 1
        if (
            item.get_closest_marker("soak") is not None
            and item.get_closest_marker("timeout") is None
        ):
            item.add_marker(pytest.mark.timeout(SOAK_SECONDS))


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Collecting makes thousands of objects that stay: the garbage collector would look at them a
    hundred times."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Workers build all kernels before a test's time runs, each from another one on, if any test
    asks for them.

    Else a job of ranks, whose time is limited, might wait for g++ on a machine whose cache is empty
    and that is busy. What was collected lives to the end: the garbage collector need not look at it
    again, nor copy it in forked ranks.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    worker = getattr(session.config, "workerinput", {}).get("workerid")
    if worker is not None and "kernel_checks" in sys.modules:
        sys.modules["kernel_checks"].build_all(6 * int(worker.removeprefix("gw")))


@pytest.fixture(scope="session", autouse=True)
def no_profile(tmp_path_factory):
    """The communication profile of whoever runs the tests must not change what `auto` means in
    them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(autouse=True)
def own_account():
    """What an earlier test left in memory, or a limit it set, is not this test's."""
    with account.use(account.MemoryAccount()) as memory:
        yield memory
