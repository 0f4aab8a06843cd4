//! `spillway serve`: becomes the program that serves the disk, which says and ends as this one would.

use crate::args::Serve;
use crate::error::{Exit, Failure};
use spillway_control::program::{ServeOrder, ServeOutput, serve_command};
use std::os::unix::process::CommandExt;

/// Serves until SIGTERM, SIGINT or SIGHUP. Returns only if it cannot.
pub fn serve(args: &Serve) -> Failure {
    let output = if args.json { ServeOutput::Report } else { ServeOutput::Line };
    let command = args
        .settings()
        .and_then(|settings| serve_command(&ServeOrder { settings, output }).map_err(Failure::from));
    match command {
        Ok(mut command) => {
            let error = command.exec();
            let program = command.get_program().to_string_lossy();
            Failure::new(Exit::Unavailable, format!("{program}: {error}: install the whole package again"))
        }
        Err(failure) => failure,
    }
}
