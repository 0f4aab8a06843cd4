//! `spillway upgrade`: another program serves a disk from here on. The server looks at it first, and decides.

use crate::args::Upgrade;
use crate::error::{Exit, Failure};
use crate::output;
use spillway_control::program::worker_program;
use spillway_control::{Client, Request};

/// Asks for it and says who serves now.
pub fn upgrade(args: &Upgrade) -> Result<(), Failure> {
    let binary = match &args.binary {
        // The server has another working directory.
        Some(path) => std::path::absolute(path),
        None => Ok(worker_program()?),
    };
    let binary = binary.map_err(|e| {
        Failure::new(
            Exit::Internal,
            format!("--binary: cannot tell where that is: {e}: give an absolute path"),
        )
    })?;
    let answer = Client::connect(&args.control)?.ask(&Request::Upgrade { binary })?;
    output::print(&match args.json {
        true => format!("{answer}\n"),
        false => format!(
            "version {} serves in process {}; the disk paused for {} ms\n",
            answer["version"].as_str().unwrap_or_default(),
            answer["worker_pid"],
            answer["pause_ms"]
        ),
    })?;
    Ok(())
}
