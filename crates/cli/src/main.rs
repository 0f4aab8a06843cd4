//! `spillway`: the command line. Thin: it reads options, calls, and shows; what a disk is, it does not know.
//!
//! Invariant: a failure is one line on standard error and one documented exit code.

mod advise;
mod args;
mod attach;
mod console;
mod dirty;
mod doctor;
#[cfg(test)]
mod documented_tests;
mod error;
mod events;
mod examples;
mod host;
mod lab;
mod man;
mod mcsio;
mod output;
mod prometheus;
mod reset;
mod run;
mod serve;
mod set;
mod stats;
mod storage_model;
mod table;
mod token;
mod top;
mod trace;
mod upgrade;

use args::{Cli, Command};
use clap::CommandFactory;
use error::Failure;
use std::process::ExitCode;

fn main() -> ExitCode {
    if let Some(arguments) = host::libvirt::hook::called(std::env::args_os()) {
        return match host::libvirt::hook::run(&arguments) {
            Ok(()) => ExitCode::SUCCESS,
            Err(failure) => {
                output::complain("error", &failure.message);
                ExitCode::from(failure.exit as u8)
            }
        };
    }
    let done = match Cli::read() {
        Err(help) if !help.use_stderr() => {
            output::print(&help.render().to_string()).map(|_| ExitCode::SUCCESS)
        }
        parsed => parsed.map_err(Failure::from).and_then(execute),
    };
    done.unwrap_or_else(|failure| {
        output::complain("error", &failure.message);
        ExitCode::from(failure.exit as u8)
    })
}

fn execute(cli: Cli) -> Result<ExitCode, Failure> {
    match cli.asked()? {
        Command::Serve(args) => return Err(serve::serve(&args)),
        Command::Run(args) => return run::run(&args),
        Command::Stats(args) => stats::stats(&args)?,
        Command::Reset(args) => reset::reset(&args)?,
        Command::Set(args) => set::set(&args)?,
        Command::Events(args) => events::events(&args)?,
        Command::Upgrade(args) => upgrade::upgrade(&args)?,
        Command::Catalog { daemon, command } => return host::catalog(&daemon, command),
        Command::Machine { daemon, command } => return host::machine(&daemon, command),
        Command::Libvirt { daemon, command } => host::libvirt(&daemon, command)?,
        Command::Image { daemon, command } => host::image(&daemon, command)?,
        Command::Operation { daemon, command } => host::operation(&daemon, command)?,
        Command::Event { daemon, events } => host::event(&daemon, &events)?,
        Command::Fleet { daemon, command } => return host::fleet(&daemon, *command),
        Command::Host { daemon, command } => host::host(&daemon, command)?,
        Command::Leftover { daemon, command } => host::leftover(&daemon, command)?,
        Command::Registry { daemon, command } => host::registry(&daemon, command)?,
        Command::Store { daemon, command } => host::store(&daemon, command)?,
        Command::Console { daemon, console } => console::console(&daemon, &console)?,
        Command::Top { daemon, top } => top::top(&daemon, &top)?,
        Command::Lab { .. } => return Err(lab::lab()),
        Command::Trace { command } => trace::trace(&command)?,
        Command::StorageModel { command } => storage_model::storage_model(&command)?,
        Command::Advise(args) => advise::advise(&args)?,
        Command::Doctor { daemon } => return doctor::doctor(&daemon),
        Command::Token { command } => token::token(&command)?,
        Command::Man(args) => man::man(&args)?,
        Command::Attach(args) => {
            output::print(&attach::instructions(&args)?)?;
        }
        Command::Completion { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "spillway", &mut script);
            output::print(&String::from_utf8_lossy(&script))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
