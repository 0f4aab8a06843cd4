//! `spillway doctor`: whether this host has what machines and disks need. Owns how findings look and end; what is looked
//! at is in `checks`, and asks spillwayd only if it is there.
//!
//! Invariant: nothing is changed, and every finding but a good one says what to do.

mod checks;

use crate::error::{Exit, Failure};
use crate::host::Daemon;
use crate::output;
use serde::Serialize;
use std::fmt::Write;
use std::process::ExitCode;

/// How it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// As it is to be.
    Ok,
    /// It works, and could be better.
    Notice,
    /// Something does not work.
    Problem,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Finding {
    /// For programs.
    check: &'static str,
    state: State,
    /// How it is, for people.
    text: String,
    /// What to do.
    advice: Option<String>,
}

impl Finding {
    fn ok(check: &'static str, text: impl Into<String>) -> Finding {
        Finding { check, state: State::Ok, text: text.into(), advice: None }
    }

    fn notice(check: &'static str, text: impl Into<String>, advice: impl Into<String>) -> Finding {
        Finding { check, state: State::Notice, text: text.into(), advice: Some(advice.into()) }
    }

    fn problem(check: &'static str, text: impl Into<String>, advice: impl Into<String>) -> Finding {
        Finding { check, state: State::Problem, text: text.into(), advice: Some(advice.into()) }
    }
}

/// Looks at everything. The exit code says whether there is a problem.
pub fn doctor(daemon: &Daemon) -> Result<ExitCode, Failure> {
    daemon.local("doctor")?;
    let (findings, is_asked) = checks::all(daemon)?;
    let problems = number(&findings, State::Problem);
    let text = if daemon.json {
        let notices = number(&findings, State::Notice);
        let value = serde_json::json!({ "problems": problems, "notices": notices, "spillwayd_asked": is_asked, "checks": findings });
        format!("{value:#}\n")
    } else {
        lines(&findings, is_asked)
    };
    output::print(&text)?;
    Ok(if problems > 0 { ExitCode::from(Exit::Found as u8) } else { ExitCode::SUCCESS })
}

fn number(findings: &[Finding], state: State) -> usize {
    findings.iter().filter(|finding| finding.state == state).count()
}

fn lines(findings: &[Finding], is_asked: bool) -> String {
    let mut out = String::new();
    for finding in findings {
        let state = match finding.state {
            State::Ok => "ok",
            State::Notice => "notice",
            State::Problem => "PROBLEM",
        };
        let _ = writeln!(out, "{state:<9}{:<13}{}", finding.check, finding.text);
        if let Some(advice) = &finding.advice {
            let _ = writeln!(out, "{:22}do: {advice}", "");
        }
    }
    let (problems, notices) = (number(findings, State::Problem), number(findings, State::Notice));
    let unasked = match is_asked {
        true => "",
        false => "; spillwayd did not answer: its stores, records and machines were not checked",
    };
    let _ = writeln!(out, "\n{problems} problems, {notices} notices{unasked}");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finding_is_a_line_and_has_its_advice_below() {
        let findings =
            [Finding::ok("swap", "there is none"), Finding::problem("qemu", "it is not here", "install it")];
        let text = lines(&findings, true);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "ok       swap         there is none");
        assert_eq!(lines[1], "PROBLEM  qemu         it is not here");
        assert_eq!(lines[2].trim(), "do: install it");
        assert_eq!(lines[4], "1 problems, 0 notices");
        let unasked = super::lines(&findings, false);
        assert!(unasked.ends_with(
            "notices; spillwayd did not answer: its stores, records and machines were not checked\n"
        ));
    }
}
