//! `spillway man`: the man pages, made from what the command line says of itself.
//!
//! Invariant: every command that `--help` shows has a page.

use crate::args::Cli;
use crate::error::{Exit, Failure};
use clap::{Args, CommandFactory};
use std::path::PathBuf;

/// Options of `man`.
#[derive(Debug, Args)]
pub struct Man {
    /// Folder to write them to; it is made if it is not there
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

/// Writes them.
pub fn man(args: &Man) -> Result<(), Failure> {
    let folder = &args.folder;
    let written =
        std::fs::create_dir_all(folder).and_then(|()| clap_mangen::generate_to(Cli::command(), folder));
    written.map_err(|e| {
        Failure::new(Exit::Create, format!("{}: {e}: give a folder that can be written", folder.display()))
    })
}
