//! `spillwayd`: keeps images, catalogs and machines of a host.

use anyhow::Result;
use clap::Parser;
use spillway_host::daemon::{self, Settings};
use std::path::PathBuf;

/// Keeps the images, catalogs and machines of a host, and runs the machines
#[derive(Parser)]
#[command(version, about)]
struct Arguments {
    /// Folder for everything that is kept: records, images, disks
    #[arg(long, value_name = "DIR", default_value = "/var/lib/spillway")]
    state: PathBuf,
    /// Socket to listen on
    #[arg(long, value_name = "SOCK", env = spillway_api::SOCKET_VARIABLE, default_value = spillway_api::DEFAULT_SOCKET)]
    socket: PathBuf,
    /// Rights of the socket
    #[arg(long, value_name = "MODE", default_value = "0600", value_parser = octal)]
    socket_mode: u32,
    /// Print the description of the interface (OpenAPI) and end
    #[arg(long)]
    print_openapi: bool,
}

fn octal(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
    mode.ok_or_else(|| "rights are octal, such as 0660".into())
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if arguments.print_openapi {
        println!("{}", spillway_host::api::document());
        return Ok(());
    }
    let settings =
        Settings { state: arguments.state, socket: arguments.socket, socket_mode: arguments.socket_mode };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let socket = settings.socket.display().to_string();
    let done = runtime.block_on(daemon::run(settings, move || println!("spillwayd: ready on {socket}")));
    // Nothing is waited for: what goes on is undone by the next start.
    runtime.shutdown_background();
    done
}
