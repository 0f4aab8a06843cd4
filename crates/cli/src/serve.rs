//! `spillway serve`: one disk until a signal. Never touches what is served.
//!
//! Invariant: whatever happens, the sockets that were made are removed.

use crate::args::Serve;
use crate::error::{Exit, Failure};
use crate::output;
use spillway_worker::supervisor::{
    Program, Report, Signals, Supervisor, SupervisorError, bytes, channel_from_supervisor,
};
use std::os::fd::AsFd;
use std::process::ExitCode;

/// Serves until SIGTERM, SIGINT or SIGHUP.
pub fn serve(args: &Serve) -> Result<(), Failure> {
    let options = args.options()?;
    let signals = signals()?;
    let mut supervisor = Supervisor::start(options, &Program::default(), output::log())?;
    let wake = [signals.as_fd()];
    if supervisor.ready(&wake)?.is_none() {
        let report = supervisor.report();
        output::print(&match args.json {
            true => format!("{}\n", serde_json::to_string(&report).expect("plain numbers and text")),
            false => ready_line(&report),
        })?;
        supervisor.run(&wake, None)?;
    }
    signals.take();
    Ok(supervisor.stop(&wake)?)
}

/// The signals that end a server.
pub fn signals() -> Result<Signals, Failure> {
    Ok(Signals::new().map_err(|e| SupervisorError::internal("cannot wait for signals", e))?)
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

/// The worker's side, in the process that a supervisor started.
pub fn worker() -> ExitCode {
    let Some(channel) = channel_from_supervisor() else {
        output::complain(
            "error",
            "'__worker' is started by 'spillway serve' and 'spillway run' only: use those",
        );
        return ExitCode::from(Exit::Usage as u8);
    };
    ExitCode::from(spillway_worker::worker::main(channel) as u8)
}
