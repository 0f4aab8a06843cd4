//! Programs that a guest agent runs (QEMU, qga/qapi-schema.json: `guest-exec`, `guest-exec-status`). Owns what their answers mean.
//!
//! Invariant: what is kept of an output is bounded, and the end of a program is waited for a bounded time: an agent cannot end a
//! program, which goes on then.

use super::started::StartedProgram;
use super::{AgentCall, AgentError};
use base64ct::{Base64, Encoding};
use serde_json::{Value, json};
use spillway_api::{
    Base64Bytes, GuestProgram, GuestProgramResult, MOST_GUEST_COMMAND_BYTES, MOST_GUEST_OUTPUT_BYTES,
};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// First and longest pause between two looks at a program. Each is half as long again as the last.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// How many looks in a row may have no answer, before the last one.
const MAX_FAILED_LOOKS: u32 = 5;

/// Returns the question that starts a program; `None`: it is too long.
pub fn question(program: &GuestProgram) -> Option<Value> {
    let (path, words) = program.argv.split_first()?;
    let mut arguments = json!({ "path": path, "arg": words, "capture-output": true });
    if let Some(variables) = &program.environment {
        arguments["env"] = variables.iter().map(|(name, value)| format!("{name}={value}")).collect();
    }
    if let Some(input) = &program.stdin_base64 {
        arguments["input-data"] = Base64::encode_string(&input.0).into();
    }
    let question = json!({ "execute": "guest-exec", "arguments": arguments });
    (question.to_string().len() <= MOST_GUEST_COMMAND_BYTES).then_some(question)
}

/// Starts a program.
pub async fn start(call: &AgentCall, question: &Value) -> Result<StartedProgram, AgentError> {
    for program in call.channel.programs.abandoned() {
        // The agent forgets one that has ended, with its outputs, when it is asked.
        if look(call, &program).await.is_err_and(|e| !matches!(e, AgentError::Refused(_))) {
            break;
        }
    }
    let note = |answer: Value| {
        let pid = answer["pid"].as_u64().ok_or(AgentError::Nonsense("no id of a process"))?;
        Ok(call.channel.programs.add(pid, &call.is_over))
    };
    call.ask_for(question, || false, note).await
}

/// Waits until a program has ended, at most so long and a last look.
pub async fn wait(
    call: &AgentCall,
    program: &StartedProgram,
    limit: Duration,
) -> Result<GuestProgramResult, AgentError> {
    let (mut pause, until) = (PAUSES.0, Instant::now() + limit);
    let (mut first_failure, mut failed_looks) = (None::<AgentError>, 0);
    loop {
        match look(call, program).await {
            Ok(Some(result)) => return Ok(result),
            Ok(None) => (first_failure, failed_looks) = (None, 0),
            Err(e) if e.is_passing() && failed_looks < MAX_FAILED_LOOKS => {
                first_failure.get_or_insert(e);
                failed_looks += 1;
            }
            // The agent has answered an earlier look, and nothing of that has arrived.
            Err(AgentError::Refused(words)) => {
                return Err(first_failure.map_or(AgentError::Refused(words), AgentError::result_lost));
            }
            Err(e) => return Err(e),
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return first_failure.map_or(Ok(unended(program.pid)), Err);
        }
        sleep(pause.min(left)).await;
        pause = (pause * 3 / 2).min(PAUSES.1);
    }
}

fn unended(pid: u64) -> GuestProgramResult {
    GuestProgramResult {
        pid,
        ended: false,
        exit_code: None,
        signal: None,
        stdout_base64: Base64Bytes::default(),
        stdout_cut: false,
        stderr_base64: Base64Bytes::default(),
        stderr_cut: false,
    }
}

/// Looks whether a program has ended. The agent forgets one that has.
async fn look(call: &AgentCall, program: &StartedProgram) -> Result<Option<GuestProgramResult>, AgentError> {
    let question = json!({ "execute": "guest-exec-status", "arguments": { "pid": program.pid } });
    let ended =
        call.ask_for(&question, || program.is_forgotten(), |answer| ended(program.pid, &answer)).await;
    if matches!(ended, Ok(Some(_)) | Err(AgentError::Refused(_))) {
        program.forget();
    }
    ended
}

/// Understands the status of a program. `None`: it has not ended.
fn ended(pid: u64, answer: &Value) -> Result<Option<GuestProgramResult>, AgentError> {
    match answer["exited"].as_bool() {
        Some(true) => {}
        Some(false) => return Ok(None),
        None => return Err(AgentError::Nonsense("not whether a program has ended")),
    }
    let (stdout, stdout_cut) = output(answer, "out-data", "out-truncated")?;
    let (stderr, stderr_cut) = output(answer, "err-data", "err-truncated")?;
    let (exit_code, signal) = (number(&answer["exitcode"])?, number(&answer["signal"])?);
    if exit_code.is_some() == signal.is_some() {
        return Err(AgentError::Nonsense("not how a program has ended"));
    }
    Ok(Some(GuestProgramResult {
        ended: true,
        exit_code,
        signal,
        stdout_base64: stdout,
        stdout_cut,
        stderr_base64: stderr,
        stderr_cut,
        ..unended(pid)
    }))
}

/// Codes of Windows are 32 bits, which an agent shows with a sign.
fn number(value: &Value) -> Result<Option<u32>, AgentError> {
    let bits = |n: i64| u32::try_from(n).or_else(|_| i32::try_from(n).map(|n| n as u32)).ok();
    match value {
        Value::Null => Ok(None),
        value => value.as_i64().and_then(bits).map(Some).ok_or(AgentError::Nonsense("a code that is none")),
    }
}

/// Returns an output, and whether it was longer. Its text was shortened while it was received, to a little more than is kept.
fn output(answer: &Value, data: &str, cut: &str) -> Result<(Base64Bytes, bool), AgentError> {
    let text = match &answer[data] {
        Value::Null => "",
        text => text.as_str().ok_or(AgentError::Nonsense("an output that is none"))?,
    };
    let mut bytes =
        Base64::decode_vec(text).map_err(|_| AgentError::Nonsense("an output that is not base64"))?;
    let is_cut = bytes.len() > MOST_GUEST_OUTPUT_BYTES || answer[cut].as_bool() == Some(true);
    bytes.truncate(MOST_GUEST_OUTPUT_BYTES);
    Ok((Base64Bytes(bytes), is_cut))
}

#[cfg(test)]
mod tests {
    use super::super::scripted::{ScriptedAgent, returned};
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    const LIMIT: Duration = Duration::from_secs(20);

    /// Waits for a program that was started with this process id.
    async fn wait(call: &AgentCall, pid: u64, limit: Duration) -> Result<GuestProgramResult, AgentError> {
        let program = call.channel.programs.add(pid, &call.is_over);
        super::wait(call, &program, limit).await
    }

    /// Starts a program. Returns its process id.
    async fn start(call: &AgentCall, question: &Value) -> Result<u64, AgentError> {
        super::start(call, question).await.map(|program| {
            program.forget();
            program.pid
        })
    }

    fn refusal() -> Vec<u8> {
        b"{\"error\":{\"desc\":\"Invalid parameter 'pid'\"}}\n".to_vec()
    }

    fn program(value: Value) -> GuestProgram {
        serde_json::from_value(value).unwrap()
    }

    #[tokio::test]
    async fn a_program_is_started_and_looked_at_until_it_ends() {
        let asked = program(
            json!({ "argv": ["sh", "-c", "x"], "environment": { "A": "b=c" }, "stdin_base64": "AP8=" }),
        );
        let ended = json!({ "exited": true, "exitcode": 3, "out-data": "AP8=", "err-data": "ZXJy", "err-truncated": true });
        let running = json!({ "exited": false });
        let agent = ScriptedAgent::returning([json!({ "pid": 7 }), running.clone(), running, ended]);
        let call = agent.call();
        let pid = start(&call, &question(&asked).unwrap()).await.unwrap();
        let result = wait(&call, pid, LIMIT).await.unwrap();
        assert_eq!((result.pid, result.ended, result.exit_code, result.signal), (7, true, Some(3), None));
        assert_eq!((result.stdout_base64.0.as_slice(), result.stdout_cut), (&[0, 255][..], false));
        assert_eq!((result.stderr_base64.0.as_slice(), result.stderr_cut), (&b"err"[..], true));
        assert_eq!(
            agent.arguments(0),
            json!({ "path": "sh", "arg": ["-c", "x"], "env": ["A=b=c"], "input-data": "AP8=", "capture-output": true })
        );
        assert_eq!(agent.arguments(3), json!({ "pid": 7 }));
    }

    #[tokio::test]
    async fn an_output_is_kept_up_to_its_bound() {
        let out = Base64::encode_string(&vec![b'o'; 16 << 20]);
        let exact = Base64::encode_string(&vec![b'e'; MOST_GUEST_OUTPUT_BYTES]);
        let agent = ScriptedAgent::returning([
            json!({ "exited": true, "signal": 9, "out-data": out, "err-data": exact }),
        ]);
        let result = wait(&agent.call(), 7, LIMIT).await.unwrap();
        assert_eq!((result.exit_code, result.signal), (None, Some(9)));
        assert_eq!((result.stdout_base64.0, result.stdout_cut), (vec![b'o'; MOST_GUEST_OUTPUT_BYTES], true));
        assert_eq!((result.stderr_base64.0, result.stderr_cut), (vec![b'e'; MOST_GUEST_OUTPUT_BYTES], false));
    }

    #[tokio::test]
    async fn a_program_that_goes_on_is_waited_for_so_long() {
        let agent = ScriptedAgent::new(|_| Some(returned(&json!({ "exited": false }))));
        let begun = std::time::Instant::now();
        let result = wait(&agent.call(), 7, Duration::from_millis(300)).await.unwrap();
        assert_eq!(result, unended(7));
        let looks = agent.commands().len();
        assert!((3..10).contains(&looks) && begun.elapsed() < LIMIT, "{looks}");
    }

    #[tokio::test]
    async fn what_makes_no_sense_is_refused() {
        let ended = |fields: Value| {
            let mut answer = json!({ "exited": true, "exitcode": 0 });
            answer.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            returned(&answer)
        };
        for wrong in [
            returned(&json!({})),
            returned(&json!([])),
            returned(&json!({ "exited": "yes" })),
            returned(&json!({ "exited": true })),
            ended(json!({ "signal": 9 })),
            ended(json!({ "exitcode": 1.5 })),
            ended(json!({ "exitcode": 1_u64 << 32 })),
            ended(json!({ "exitcode": i64::MIN })),
            ended(json!({ "out-data": 7 })),
            ended(json!({ "out-data": "A" })),
            ended(json!({ "err-data": "hello there" })),
            b"{}\n".to_vec(),
            b"not JSON\n".to_vec(),
            b"{\"return\":{}\n".to_vec(),
        ] {
            let text = String::from_utf8_lossy(&wrong).into_owned();
            let agent = ScriptedAgent::new(move |_| Some(wrong.clone()));
            let error = wait(&agent.call(), 7, LIMIT).await.unwrap_err();
            assert!(matches!(error, AgentError::Nonsense(_)), "{text}: {error:?}");
            let error = start(&agent.call(), &json!({ "execute": "guest-exec" })).await.unwrap_err();
            assert!(matches!(error, AgentError::Nonsense(_)), "{text}: {error:?}");
        }
    }

    #[tokio::test]
    async fn a_line_that_does_not_end_is_refused_and_a_wrong_process_said() {
        let agent = ScriptedAgent::new(|_| Some(vec![b'['; 8 << 20]));
        let error = wait(&agent.call(), 7, LIMIT).await.unwrap_err();
        assert_eq!(error, AgentError::Nonsense("its answer does not end"));
        let agent = ScriptedAgent::new(|_| {
            Some(b"{\"error\":{\"class\":\"GenericError\",\"desc\":\"PID 7 does not exist\"}}\n".to_vec())
        });
        let error = wait(&agent.call(), 7, LIMIT).await.unwrap_err();
        assert_eq!(error, AgentError::refused("PID 7 does not exist"));
    }

    #[tokio::test]
    async fn what_another_vmm_answers_is_not_passed_on() {
        let ended = json!({ "exited": true, "exitcode": 0, "out-data": "AAAA" });
        let (ends, end) = std::sync::mpsc::channel::<Arc<std::sync::atomic::AtomicBool>>();
        let agent = ScriptedAgent::new(move |_| {
            // Between the question and the answer.
            end.recv().unwrap().store(true, Ordering::Relaxed);
            Some(returned(&ended))
        });
        ends.send(Arc::clone(&agent.is_over)).unwrap();
        assert_eq!(wait(&agent.call(), 7, LIMIT).await, Err(AgentError::Over));
        assert_eq!(wait(&agent.call(), 7, LIMIT).await, Err(AgentError::Over));
        assert_eq!(agent.commands().len(), 1, "it is not asked any more");
    }

    #[tokio::test]
    async fn a_process_id_that_is_given_again_ends_the_wait_for_the_program_that_had_it() {
        let agent = ScriptedAgent::new(|asked| {
            let is_status = asked["execute"] == "guest-exec-status";
            let theirs = json!({ "exited": true, "exitcode": 0, "out-data": "AAAA" });
            Some(returned(&if is_status { theirs } else { json!({ "pid": 7 }) }))
        });
        let (call, other) = (agent.call(), agent.call());
        let question = json!({ "execute": "guest-exec" });
        let program = super::start(&call, &question).await.unwrap();
        // The guest has restarted, and gives its process ids again.
        let second = super::start(&other, &question).await.unwrap();
        assert_eq!(super::wait(&call, &program, LIMIT).await, Err(AgentError::Over));
        assert_eq!(agent.commands(), ["guest-exec", "guest-exec"], "its result is not taken by others");
        assert_eq!(super::wait(&other, &second, LIMIT).await.unwrap().stdout_base64.0, [0; 3]);
    }

    #[tokio::test]
    async fn an_agent_is_asked_for_abandoned_programs_before_the_next_one_starts() {
        let mut looks = 0;
        let agent = ScriptedAgent::new(move |asked| {
            if asked["execute"] == "guest-exec" {
                return Some(returned(&json!({ "pid": 9 })));
            }
            looks += 1;
            Some(match looks {
                1 => returned(&json!({ "exited": false })),
                2 => returned(&json!({ "exited": true, "exitcode": 0 })),
                _ => refusal(),
            })
        });
        let call = agent.call();
        let question = json!({ "execute": "guest-exec" });
        let left = call.channel.programs.add(7, &call.is_over);
        let waits = super::wait(&call, &left, LIMIT);
        // Whoever waits leaves after the first look.
        tokio::time::timeout(Duration::from_millis(40), waits).await.unwrap_err();
        drop(left);
        drop(call.channel.programs.add(8, &call.is_over));
        start(&call, &question).await.unwrap();
        start(&call, &question).await.unwrap();
        let status = "guest-exec-status";
        assert_eq!(agent.commands(), [status, status, status, "guest-exec", "guest-exec"]);
        assert_eq!([1, 2].map(|n| agent.arguments(n)["pid"].as_u64()), [Some(7), Some(8)]);
        assert!(call.channel.programs.is_empty());
    }

    #[tokio::test]
    async fn a_result_that_was_lost_on_the_way_is_told_apart_from_a_wrong_process() {
        let mut looks = 0;
        let agent = ScriptedAgent::new(move |_| {
            looks += 1;
            // The connection ends in the middle of the first answer.
            Some(if looks == 1 { ScriptedAgent::hang_up(br#"{"return":{"exited":true"#) } else { refusal() })
        });
        let error = wait(&agent.call(), 7, LIMIT).await.unwrap_err();
        assert!(matches!(error, AgentError::ResultLost(_)), "{error:?}");
        let agent = ScriptedAgent::new(|_| Some(refusal()));
        let error = wait(&agent.call(), 7, LIMIT).await.unwrap_err();
        assert_eq!(error, AgentError::refused("Invalid parameter 'pid'"));
    }

    #[tokio::test]
    async fn a_last_look_without_an_answer_does_not_say_that_a_program_goes_on() {
        let mut looks = 0;
        let agent = ScriptedAgent::new(move |_| {
            looks += 1;
            Some(match looks {
                1 => returned(&json!({ "exited": false })),
                _ => ScriptedAgent::hang_up(b""),
            })
        });
        let error = wait(&agent.call(), 7, Duration::from_millis(300)).await.unwrap_err();
        assert!(matches!(error, AgentError::Unreachable(_)), "{error:?}");
    }

    #[tokio::test]
    async fn a_long_program_keeps_nobody_else_waiting() {
        let agent = ScriptedAgent::new(|asked| {
            let is_status = asked["execute"] == "guest-exec-status";
            Some(returned(&if is_status { json!({ "exited": false }) } else { json!({ "pid": 8 }) }))
        });
        let call = Arc::new(agent.call());
        let long = tokio::spawn({
            let call = Arc::clone(&call);
            async move { wait(&call, 7, Duration::from_secs(3600)).await }
        });
        for _ in 0..20 {
            assert_eq!(start(&call, &json!({ "execute": "guest-exec" })).await, Ok(8));
        }
        assert!(!long.is_finished());
        long.abort();
    }

    #[test]
    fn a_command_that_is_too_long_is_none() {
        let of = |length: usize| question(&program(json!({ "argv": ["a", "b".repeat(length)] })));
        assert!(of(MOST_GUEST_COMMAND_BYTES / 2).is_some() && of(MOST_GUEST_COMMAND_BYTES).is_none());
        let input = Base64::encode_string(&vec![b'x'; spillway_api::MOST_GUEST_INPUT_BYTES]);
        assert!(question(&program(json!({ "argv": ["a"], "stdin_base64": input }))).is_some());
    }
}
