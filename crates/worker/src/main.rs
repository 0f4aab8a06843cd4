//! `spillway-worker`: serves one disk. Started by `spillway serve`, `spillway run` and `spillwayd`, never by hand.
//!
//! Owns what the program says to its own starter; a process of it is a supervisor, or a worker that a supervisor has started.
//! Invariant: a failure is one line on standard error and an exit code of [`spillway_control::Exit`].

use spillway_control::program::{PROBE, Probe, SERVE, ServeOrder, ServeOutput};
use spillway_control::{ErrorKind, Exit, Report, Signals, SupervisorError, bytes, output};
use spillway_worker::supervisor::{ConsoleHub, Program, Supervisor, WORK, channel_from_supervisor};
use spillway_worker::worker;
use std::ffi::OsString;
use std::os::fd::AsFd;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let words: Vec<Option<&str>> = arguments.iter().map(|argument| argument.to_str()).collect();
    let done = match words.as_slice() {
        [Some(WORK)] => return work(),
        [Some(SERVE), Some(order)] => serve(order),
        [Some(PROBE)] => probe(),
        [Some("--version")] => say(&format!("spillway-worker {}\n", env!("CARGO_PKG_VERSION"))),
        _ => Err(misused()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::complain("error", &error.to_string());
            ExitCode::from(error.kind.exit() as u8)
        }
    }
}

fn misused() -> SupervisorError {
    let message =
        "spillway-worker is started by 'spillway serve', 'spillway run' and spillwayd only: use those";
    SupervisorError::new(ErrorKind::Options, message)
}

fn say(text: &str) -> Result<(), SupervisorError> {
    output::print(text).map(drop)
}

fn json<T: serde::Serialize>(value: &T) -> String {
    format!("{}\n", serde_json::to_string(value).expect("plain numbers and text"))
}

/// What a supervisor has started this process for.
fn work() -> ExitCode {
    match channel_from_supervisor() {
        Some(channel) => ExitCode::from(worker::main(channel) as u8),
        None => {
            output::complain("error", &misused().to_string());
            ExitCode::from(Exit::Usage as u8)
        }
    }
}

fn probe() -> Result<(), SupervisorError> {
    say(&json(&Probe {
        version: env!("CARGO_PKG_VERSION").into(),
        io_uring: worker::io_uring_is_usable().map_err(|error| error.text),
        landlock: worker::sandbox::landlock_version(),
    }))
}

/// One disk until SIGTERM, SIGINT or SIGHUP.
fn serve(order: &str) -> Result<(), SupervisorError> {
    // It is the server that people have started, whatever its file is called.
    let _ = rustix::thread::set_name(c"spillway");
    let order = ServeOrder::parse(order)?.ok_or_else(misused)?;
    let signals = Signals::new()?;
    // Clients of the console see its end after that of the disk.
    let _console = ConsoleHub::start(&order.settings)?;
    let mut supervisor = Supervisor::start(order.settings, &Program::default(), output::log())?;
    let wake = [signals.as_fd()];
    if supervisor.ready(&wake)?.is_none() {
        let report = supervisor.report();
        say(&match order.output {
            ServeOutput::Line => ready_line(&report),
            ServeOutput::Report | ServeOutput::ReportAndStats => json(&report),
        })?;
        supervisor.run(&wake, None)?;
    }
    signals.take();
    supervisor.stop(&wake)?;
    match order.output {
        ServeOutput::ReportAndStats => say(&json(&supervisor.stats())),
        ServeOutput::Line | ServeOutput::Report => Ok(()),
    }
}

fn ready_line(report: &Report) -> String {
    let ways = [("vhost-user", &report.vhost_user), ("NBD", &report.nbd), ("control", &report.control)];
    let ways: Vec<_> =
        ways.iter().filter_map(|(name, path)| Some(format!("{name} {}", path.as_ref()?))).collect();
    format!(
        "spillway: ready: {} as a disk of {}, mode {}, on {} (pid {}, worker {})\n",
        report.image,
        bytes(report.size_bytes),
        report.mode,
        ways.join(", "),
        report.pid,
        report.worker_pid
    )
}
