"""What the threat-model page promises is held by tests, by name."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "threat-model.md"
SERVICE, CLIENTS, AGENT = "orchestrator/service", "orchestrator/clients", "launchers/agent"
STORE, MODES = "runtime/collectives/test_store.py", "launchers/test_strict_modes.py"

# By how a paragraph, an entry of a list or a row of a table begins: the tests (file below tests/, name) that hold it.
PROMISES: dict[str, list[tuple[str, str]]] = {
    "| another user of the same machine": [
        (MODES, "test_what_others_can_write_is_not_believed"),
        ("e2e/test_listening.py", "test_a_job_on_this_machine"),
    ],
    "| a stranger on the same network": [
        (f"{AGENT}/test_link_protocol.py", "test_who_does_not_hold_the_token_is_never_heard_by_the_hub"),
        (STORE, "test_a_stranger_changes_nothing_and_holds_nobody_up"),
    ],
    "| a writer to a checkpoint bucket": [
        ("runtime/checkpoint/test_code_in_files.py", "test_no_file_of_a_checkpoint_runs_code"),
        ("runtime/checkpoint/storage/test_remote.py", "test_a_manifest_writes_no_file_outside_of_its_directory"),
    ],
    "| the job's output and names": [
        ("orchestrator/cli/ui/test_terminal.py", "test_no_command_passes_on_what_would_act_on_a_terminal"),
    ],
    "| a cluster's answers": [
        ("orchestrator/engine/test_exactly_once.py", "test_no_job_is_lost_or_runs_twice_and_no_status_is_untrue"),
    ],
    "On the submitting machine nothing": [("e2e/test_listening.py", "test_orc_launch")],
    "| the *store* of the ranks": [
        (STORE, "test_another_key_is_refused_on_both_sides"),
        ("runtime/launch/test_listening.py", "test_ranks_on_one_machine_listen_on_loopback_alone"),
    ],
    "| torch's store (TCPStore)": [
        ("runtime/launch/test_listening.py", "test_what_is_written_into_the_store_of_torch_stops_nobody"),
    ],
    "| gloo |": [("e2e/test_listening.py", "test_a_job_on_this_machine")],
    "| NCCL |": [(f"{AGENT}/test_network.py", "test_ranks_of_one_node_are_kept_on_its_loopback_interface")],
    "| Ray, with": [("launchers/commands/test_ray.py", "test_the_token_is_in_the_environment_and_on_no_command_line")],
    "| the link between agents": [
        (f"{AGENT}/test_link.py", "test_a_token_that_is_not_the_attempts_is_turned_away_on_both_sides"),
        (f"{AGENT}/test_link_protocol.py", "test_tls_before_1_2_is_refused_on_both_sides"),
    ],
    "`orc launch` is the same as": [
        ("runtime/launch/test_listening.py", "test_a_name_of_this_machine_is_resolved_to_what_others_know_it_by")
    ],
    "torch's store answers every client": [
        ("runtime/launch/test_listening.py", "test_what_is_written_into_the_store_of_torch_stops_nobody"),
    ],
    "- **Key.** An agent": [
        (f"{AGENT}/test_network.py", "test_each_incarnation_has_a_token_of_its_own_that_all_of_its_ranks_have"),
        (f"{AGENT}/test_network.py", "test_hosts_make_the_token_of_their_ranks_from_that_of_their_link"),
        (f"{AGENT}/test_network.py", "test_an_inherited_token_is_not_passed_on"),
        (STORE, "test_the_key_is_handed_round_only_where_the_launcher_gave_none"),
    ],
    "- **Greeting.**": [
        (STORE, "test_another_key_is_refused_on_both_sides"),
        (STORE, "test_a_crowd_of_silent_strangers_is_turned_away_after_a_while"),
    ],
    "- **Messages.**": [(STORE, "test_what_is_changed_on_its_way_ends_the_connection")],
    "A forked worker closes": [
        (STORE, "test_a_forked_child_takes_a_connection_of_its_own"),
        ("runtime/observe/test_watchdog.py", "test_rank_0_that_serves_the_store_is_named_when_it_gives_no_answer"),
    ],
    "- **Where.** 127.0.0.1": [
        (f"{SERVICE}/test_serve.py", "test_it_refuses_a_wider_address_without_a_token_and_without_encryption"),
        (f"{SERVICE}/test_access.py", "test_nothing_answers_without_a_token_but_what_is_public"),
    ],
    "- **Who.** A token": [
        ("orchestrator/ledger/test_tables.py", "test_a_token_is_known_by_its_hash_alone_until_it_ends"),
        (f"{SERVICE}/test_access.py", "test_a_token_made_by_rest_ends_when_one_of_the_command_would"),
        (f"{SERVICE}/test_access.py", "test_a_token_that_has_ended_opens_no_door"),
        (f"{SERVICE}/test_limits.py", "test_an_address_that_guesses_tokens_has_to_wait_and_a_valid_token_does_not"),
        (f"{SERVICE}/test_faults.py", "test_a_token_that_ends_closes_what_was_opened_with_it"),
    ],
    "- **What.** One function": [
        (f"{SERVICE}/test_access.py", "test_each_role_reaches_what_it_may_and_nothing_else"),
        (f"{SERVICE}/test_rights.py", "test_every_route_says_what_it_shows"),
        (f"{SERVICE}/test_rights.py", "test_each_route_shows_to_each_reader_what_the_table_has"),
    ],
    "- **Artefacts.**": [
        (f"{CLIENTS}/test_submitting.py", "test_artefacts_are_taken_by_their_owner_and_by_admins"),
        (f"{CLIENTS}/test_submitting.py", "test_jobs_are_changed_by_their_owner_and_by_admins"),
    ],
    "- **Browsers.**": [
        (f"{SERVICE}/test_access.py", "test_a_session_of_a_browser_needs_the_header_for_changes"),
        (f"{SERVICE}/test_hostile_requests.py", "test_another_name_of_this_machine_is_refused"),
        (f"{SERVICE}/web/test_page.py", "test_logging_in_leads_to_this_service_alone"),
    ],
    "- **How much.**": [
        (f"{SERVICE}/test_hostile_requests.py", "test_a_gigabyte_is_refused_before_it_is_read"),
        (f"{SERVICE}/test_hostile_requests.py", "test_a_body_that_comes_byte_by_byte_is_given_up"),
        (f"{SERVICE}/test_limits.py", "test_a_token_has_to_wait_when_it_asks_too_often"),
        (f"{SERVICE}/test_slow_reads.py", "test_a_viewer_whose_reads_hang_keeps_no_route_and_no_other_user_waiting"),
        (f"{SERVICE}/test_slow_reads.py", "test_streams_of_a_token_are_limited_by_themselves"),
    ],
    "- **Accounts.**": [
        ("orchestrator/engine/test_accounts.py", "test_jobs_are_sent_seen_and_ended_with_the_account_of_their_owner"),
        (
            "orchestrator/engine/test_accounts.py",
            "test_jobs_that_live_while_accounts_change_are_reached_as_they_were_sent",
        ),
        ("orchestrator/engine/test_accounts.py", "test_who_has_no_account_gets_none"),
        (f"{CLIENTS}/test_submitting.py", "test_a_cluster_that_lends_no_account_refuses_others_jobs"),
        (
            "launchers/backends/local/test_backend.py",
            "test_a_job_of_another_user_gets_nothing_of_the_services_environment",
        ),
    ],
    "- **Code.** Contents": [
        (f"{CLIENTS}/test_uploads.py", "test_a_stream_that_is_not_whole_and_right_leaves_nothing"),
        (f"{CLIENTS}/test_uploads.py", "test_a_manifest_with_a_path_that_leaves_the_tree_is_refused"),
        (f"{SERVICE}/test_rights.py", "test_a_digest_is_no_right_to_what_it_names"),
        (
            f"{SERVICE}/test_housekeeping.py",
            "test_holders_of_contents_are_forgotten_and_changes_without_an_answer_become_lines",
        ),
    ],
    "- **Secrets.** A job": [
        (f"{CLIENTS}/test_submitting.py", "test_a_secret_reaches_its_job_and_nothing_else"),
        (f"{CLIENTS}/test_submitting.py", "test_what_the_service_itself_knows_is_nobodys_secret"),
        (f"{CLIENTS}/test_submitting.py", "test_keys_rotate_and_a_lost_one_is_said"),
        (f"{CLIENTS}/test_group_submission.py", "test_secrets_of_a_schedule_are_sealed_and_reach_its_jobs"),
        (f"{SERVICE}/test_rights.py", "test_an_owner_sees_all_of_a_job_and_nobody_sees_a_secret"),
    ],
    "- **Tokens at the client.**": [
        (f"{CLIENTS}/test_commands.py", "test_a_login_is_kept_for_the_user_alone_until_logout"),
        (f"{CLIENTS}/test_commands.py", "test_a_token_does_not_travel_in_the_clear"),
        (f"{CLIENTS}/test_encryption.py", "test_a_redirection_is_not_followed"),
        (f"{CLIENTS}/test_encryption.py", "test_a_certificate_is_verified"),
    ],
    "- **What is kept.**": [
        (
            f"{SERVICE}/test_faults.py",
            "test_a_change_of_a_service_that_was_killed_before_it_answered_is_in_the_audit_log",
        ),
        (f"{SERVICE}/test_access.py", "test_refused_changes_are_in_the_audit_log_with_who_sent_them"),
        (f"{SERVICE}/test_access.py", "test_a_token_is_shown_once_and_ends"),
    ],
    "2. [`network: {interface, cidr}`]": [
        (f"{AGENT}/test_network.py", "test_a_node_outside_of_the_network_of_its_job_says_so"),
    ],
    "Objects that ranks send each other": [
        ("runtime/collectives/test_signed.py", "test_objects_of_somebody_else_are_not_read"),
        ("runtime/collectives/test_signed.py", "test_anything_else_is_refused"),
    ],
    "Records, logs and secrets are written": [
        ("orchestrator/cli/test_modes.py", "test_directories_of_a_submission_and_of_a_launch_are_private"),
        (f"{AGENT}/test_node.py", "test_ranks_keep_the_users_umask_and_records_are_private"),
        ("launchers/test_paths.py", "test_the_state_directory_is_private_and_made_once"),
    ],
    "orc does not trust files that another user could have written": [
        (MODES, "test_what_belongs_to_another_user_is_not_believed"),
        (MODES, "test_a_link_of_another_user_is_not_followed"),
        (MODES, "test_a_directory_above_may_be_sticky_and_the_last_may_not"),
        (MODES, "test_a_group_of_ones_own_is_no_other"),
    ],
    "| state directory |": [(MODES, "test_the_state_directory_is_checked_and_made_private")],
    "| `clusters.yaml`, hostfiles": [(MODES, "test_files_that_name_machines_and_programs_are_checked")],
    "| root, store, trees and jobs": [(MODES, "test_a_root_that_others_prepared_runs_nothing")],
    "| the same on hosts": [(MODES, "test_a_host_takes_no_orders_from_a_directory_of_others")],
    "| attempt directory and agent": [(MODES, "test_a_host_takes_no_orders_from_a_directory_of_others")],
    "The error names the path": [
        (MODES, "test_what_others_can_write_is_not_believed"),
        (MODES, "test_a_path_that_is_named_is_believed"),
    ],
    "Names in manifests": [
        ("runtime/core/test_names.py", "test_names_that_lead_elsewhere_are_refused"),
        ("runtime/core/test_names.py", "test_offloaded_weights_stay_in_their_folder"),
        ("launchers/snapshot/test_manifest.py", "test_links_out_of_the_tree_are_refused"),
        ("launchers/containers/test_program.py", "test_an_archive_cannot_reach_out_of_its_place"),
    ],
    "A working directory may come": [
        ("launchers/snapshot/test_scan.py", "test_git_runs_nothing_that_a_repository_asks_for"),
        ("launchers/snapshot/test_scan.py", "test_files_with_credentials_are_named"),
        ("launchers/spec/test_interpolation.py", "test_references_expand_to_a_bounded_size"),
    ],
    "Bytes of logs, tags, names": [
        ("launchers/test_control_characters.py", "test_whatever_acts_on_a_terminal_is_shown_instead"),
        ("orchestrator/cli/ui/test_terminal.py", "test_nothing_prints_past_the_escaping"),
        ("orchestrator/cli/ui/test_terminal.py", "test_logs_are_byte_for_byte_where_no_terminal_is"),
    ],
    "A process in a job's account": [
        (f"{AGENT}/test_record_border.py", "test_nonsense_in_a_field_spoils_no_other_attempt"),
        (f"{AGENT}/test_record_border.py", "test_whatever_lies_in_the_place_of_a_record_spoils_no_other_attempt"),
        (f"{AGENT}/test_record_border.py", "test_a_job_has_no_more_nodes_than_its_plan"),
        ("orchestrator/engine/test_reconciler.py", "test_what_one_job_has_left_keeps_no_other_job_waiting"),
        ("orchestrator/insight/test_metrics.py", "test_a_look_ends_in_time_and_the_next_goes_on"),
    ],
    "Values are resolved at submission": [
        ("orchestrator/engine/test_job_secrets.py", "test_no_secret_value_reaches_the_ledger"),
        ("launchers/backends/ssh/test_backend.py", "test_files_with_secrets_are_private"),
        ("launchers/backends/ssh/test_backend.py", "test_secrets_do_not_outlive_agents_that_were_killed"),
        (f"{AGENT}/test_masking.py", "test_ranks_with_secrets_leave_no_core_file_unless_that_is_asked_for"),
    ],
    "Quotes from logs": [
        (f"{AGENT}/test_masking.py", "test_a_value_is_masked_in_every_form"),
        (f"{AGENT}/test_masking.py", "test_a_tail_is_masked_before_it_is_cut"),
        (f"{AGENT}/test_node.py", "test_secrets_are_blotted_out_of_the_failure_that_travels"),
    ],
    "Accelerate documents `orc launch --aws_access_key_id": [
        (
            "orchestrator/cli/commands/test_launch_documented.py",
            "test_keys_of_aws_leave_the_command_line_and_reach_the_submission_alone",
        ),
    ],
    "Host keys are checked": [
        (
            "launchers/remote/ssh/test_known_hosts.py",
            "test_an_unknown_host_is_refused_with_its_fingerprint_and_what_to_do",
        ),
        ("launchers/remote/ssh/test_known_hosts.py", "test_a_changed_key_is_always_refused_with_file_and_line"),
        ("launchers/backends/ssh/test_settings.py", "test_a_hostfile_brings_no_shell_words"),
    ],
}
# What says how things are, or what is not protected, and promises nothing.
DESCRIBED = (
    *("This page says who is trusted", "Trusted are the user", "Not trusted:", "| who | can |", "Out of scope:"),
    *(
        "| what | where |",
        "| `mpirun`, `deepspeed` daemons",
        "| `orc doctor --cluster`, every pair",
        "| `orc doctor --cluster`, the all-reduce",
    ),
    *("| `ranks in tests`", "Unix sockets, on a host", "- **Not encrypted.**", "`orc serve` is the one part"),
    *(
        "A client that reaches the ports",
        "Fences, from strong",
        "1. Machines and a network",
        "3. A firewall on the nodes",
    ),
    *("| checked | when |", "Nothing in a shared directory"),
)


def paragraphs() -> list[str]:
    """Return the paragraphs, entries of lists and rows of tables of the page, but for the reviewer's table of files."""
    text = PAGE.read_text().partition("## Files for a reviewer")[0]
    blocks: list[str] = []
    open_ = False
    for line in text.splitlines():
        if not line.strip() or line.startswith(("#", "|-")):
            open_ = False
        elif open_ and not re.match(r"- |\| |\d+\. ", line):
            blocks[-1] += " " + line.strip()
        else:
            blocks.append(line.strip())
            open_ = True
    return blocks


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


@pytest.mark.parametrize("paragraph", paragraphs(), ids=lambda text: text[:40])
def test_a_paragraph_has_its_tests_or_promises_nothing(paragraph: str) -> None:
    known = [begin for begin in (*PROMISES, *DESCRIBED) if paragraph.startswith(begin)]
    assert len(known) == 1, (
        f"say in {Path(__file__).name} which tests hold this, or that it promises nothing: {paragraph}"
    )


@pytest.mark.parametrize("begin", [*PROMISES, *DESCRIBED], ids=lambda text: text[:40])
def test_no_entry_is_about_what_the_page_does_not_say(begin: str) -> None:
    assert any(paragraph.startswith(begin) for paragraph in paragraphs())


@pytest.mark.parametrize(("file", "name"), sorted({test for tests in PROMISES.values() for test in tests}))
def test_a_test_that_holds_a_promise_is_there(file: str, name: str) -> None:
    assert name in names_in(file)
