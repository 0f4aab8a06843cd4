//! `spillway man`: the man pages, made from what the command line says of itself.
//!
//! Invariant: every command that `--help` shows has a page.

use crate::args::Cli;
use crate::error::{Exit, Failure};
use clap::{Args, Command, CommandFactory};
use clap_mangen::Man;
use spillway_control::man_page;
use std::io;
use std::path::{Path, PathBuf};

/// Options of `man`.
#[derive(Debug, Args)]
pub struct ManOptions {
    /// Folder to write them to; it is made if it is not there
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

/// Writes them.
pub fn man(args: &ManOptions) -> Result<(), Failure> {
    let folder = &args.folder;
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    let written = std::fs::create_dir_all(folder).and_then(|()| write(command, folder));
    written.map_err(|e| {
        Failure::new(Exit::Create, format!("{}: {e}: give a folder that can be written", folder.display()))
    })
}

/// Writes the pages of a command and of those below it.
fn write(command: Command, folder: &Path) -> io::Result<()> {
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()).cloned() {
        write(below, folder)?;
    }
    let page = Man::new(command).source(concat!("spillway ", env!("CARGO_PKG_VERSION")));
    let mut text = Vec::new();
    page.render(&mut text)?;
    let text = String::from_utf8(text).map_err(io::Error::other)?;
    std::fs::write(folder.join(page.get_filename()), man_page::with_sections(&text))
}
