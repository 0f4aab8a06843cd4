//! `spillway upgrade`: another program serves a disk from here on. The server looks at it first, and decides.

use crate::args::Upgrade;
use crate::error::{Exit, Failure};
use crate::output;
use spillway_worker::supervisor::{Client, Request};

/// Asks for it and says who serves now.
pub fn upgrade(args: &Upgrade) -> Result<(), Failure> {
    let binary = match &args.binary {
        // The server has another working directory.
        Some(path) => std::path::absolute(path),
        None => std::env::current_exe(),
    };
    let binary = binary.map_err(|e| {
        Failure::new(Exit::Internal, format!("cannot tell which program this is: {e}: give it with --binary"))
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
