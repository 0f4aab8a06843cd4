//! The program of a machine's trusted platform module (swtpm): a process in the machine's folder, which serves one VMM and ends with
//! it. Owns its command line and its socket.
//!
//! Invariant: it writes to the module's state alone, and no more than that can ever be: a guest that has taken it over can fill no file
//! system.

use super::grant_group;
use super::handles::listener;
use super::state::FirmwareState;
use crate::error::HostError;
use crate::guest_users;
use crate::hypervisor::qemu;
use crate::processes::{self, ObservedProcess};
use crate::scopes::{Scopes, followed_by, is_there};
use spillway_api::ErrorCode;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Name of the process.
pub const PROCESS: &str = "tpm";
const PROGRAM: &str = "swtpm";
/// Limits what a program writes (util-linux, prlimit(1)).
const PRLIMIT: &str = "prlimit";
/// Largest state: libtpms has up to 136 KiB of persistent, and as much of volatile state.
const MOST_STATE_BYTES: u64 = 1 << 20;
/// How long the program may take to end when its VMM has.
const END: Duration = Duration::from_secs(2);

/// Starts the program for the next VMM. It runs as this user and group, and members of that group may connect to it.
pub fn start(
    folder: &Path,
    state: &FirmwareState,
    user: Option<(u32, u32)>,
    scopes: &Scopes,
) -> Result<(), HostError> {
    end(folder)?;
    let mut command = Command::new(PROGRAM);
    if !is_there(&command) {
        let message = "swtpm, which a machine with a TPM needs, is not installed (Debian: swtpm)";
        return Err(HostError::new(ErrorCode::Unavailable, message));
    }
    let file = state.open_tpm(user)?;
    let socket = listener(folder, qemu::TPM)?;
    command.args(["socket", "--tpm2", "--terminate"]);
    command.arg("--tpmstate").arg(format!("backend-uri=file:///proc/self/fd/{}", file.as_raw_fd()));
    command.arg("--ctrl").arg(format!("type=unixio,fd={}", socket.as_raw_fd()));
    let mut limited = Command::new(PRLIMIT);
    limited.arg(format!("--fsize={MOST_STATE_BYTES}")).arg("--");
    let mut command = followed_by(limited, &command);
    if let Some((user, group)) = user {
        grant_group(&folder.join(qemu::TPM), group, 0o660)?;
        command = guest_users::run_as(&command, user, Some(group));
    }
    let command = scopes.place(folder, PROCESS, command);
    processes::start_with(folder, PROCESS, command, &[file.as_fd(), socket.as_fd()]).map(drop)
}

/// Ends the program, which does so by itself when its VMM has ended.
pub fn end(folder: &Path) -> Result<(), HostError> {
    if let ObservedProcess::Alive(process) = processes::look(folder, PROCESS)?
        && !process.ends_within(END)
    {
        process.end(END)?;
    }
    processes::forget(folder, PROCESS)
}
