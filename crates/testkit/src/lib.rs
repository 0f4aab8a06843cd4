//! What tests and measurements hold the shipped programs with: disks and daemons that end with their value, a driver that asks as
//! a guest would, loads and the record of what they wrote, real guests, and random numbers by seed.
//!
//! Knows the product only by its command line, its sockets and its printed counters, never by its insides.

pub mod certificate;
pub mod console;
pub mod cores;
pub mod cpio;
pub mod daemon;
pub mod disk;
pub mod driver;
pub mod etcd;
pub mod flow;
pub mod footprint;
pub mod guest;
pub mod load;
pub mod mixed;
pub mod null;
pub mod oracle;
pub mod process;
mod shared;
pub mod steady;
pub mod store_proxy;
pub mod viostor;
pub mod websocket;
pub mod windows;

pub use disk::Disk;
pub use driver::{Ask, Driver, Shape};
pub use flow::Flow;
pub use load::{End, Load, Measured, Rng, Skew};
pub use mixed::Mixed;
pub use null::NullDisk;
pub use oracle::Oracle;
pub use process::Server;

/// Says that a test could not run here, so that it counts as skipped: past the test harness's capture, in the
/// form that `make test` looks for. Fails the test unless `SPILLWAY_ALLOW_SKIP` is 1.
pub fn skip(why: &str) {
    use std::io::Write;
    let allowed = std::env::var_os("SPILLWAY_ALLOW_SKIP").is_some_and(|value| value == "1");
    assert!(allowed, "{why} (SPILLWAY_ALLOW_SKIP=1 skips this test)");
    let _ = writeln!(std::io::stderr(), "SKIP: {why}");
}

/// Whether a program can be started by its name.
pub fn has_program(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(name).is_file())
}
