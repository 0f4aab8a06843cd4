//! `spillway-streamd`: brings images from registries. The daemon `spillwayd` starts it; nobody else needs to.
//!
//! Owns all traffic with stores of images, and with the web servers and OCI registries that images are imported from. It has no other rights than those that its starter left it.

mod causes;
mod download;
mod job;
mod serve;
mod store;

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["job"] => job::run(),
        ["serve", order] => serve::run(order),
        ["--version"] => {
            println!("spillway-streamd {}", env!("CARGO_PKG_VERSION"));
            ExitCode::SUCCESS
        }
        _ => {
            eprintln!("spillway-streamd is started by spillwayd: see 'spillway registry --help'");
            ExitCode::from(2)
        }
    }
}
