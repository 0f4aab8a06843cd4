//! Tap devices in bridges of this host, for QEMU processes that may not create one. QEMU's own bridge helper creates
//! them, by the host's list of allowed bridges (`/etc/qemu/bridge.conf`). Owns nothing.
//!
//! Invariant: a tap disappears with the last process that holds it.

use crate::error::HostError;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use spillway_api::ErrorCode;
use spillway_control::output_within;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Paths of the bridge helper in distributions.
const BRIDGE_HELPERS: [&str; 3] = [
    "/usr/lib/qemu/qemu-bridge-helper",
    "/usr/libexec/qemu-bridge-helper",
    "/usr/local/libexec/qemu-bridge-helper",
];

/// How long that program may take.
const DEADLINE: Duration = Duration::from_secs(30);

/// Creates a tap in a bridge.
pub fn tap(bridge: &str) -> Result<OwnedFd, HostError> {
    let failed = |code, why: &str| HostError::new(code, format!("no tap in the bridge '{bridge}': {why}"));
    let bridge_helper =
        BRIDGE_HELPERS.iter().find(|bridge_helper| Path::new(bridge_helper).exists()).ok_or_else(|| {
            failed(
                ErrorCode::Unavailable,
                "qemu-bridge-helper is not installed (Debian: qemu-system-common, which comes with QEMU)",
            )
        })?;
    let internal = |e: std::io::Error| failed(ErrorCode::Internal, &format!("{bridge_helper}: {e}"));
    let (ours, theirs) = UnixStream::pair().map_err(internal)?;
    // Its standard input is the socket over which it sends the tap.
    let mut command = Command::new(bridge_helper);
    command.args(["--use-vnet", "--fd=0", &format!("--br={bridge}")]);
    command.stdin(Stdio::from(OwnedFd::from(theirs)));
    let done = output_within(&mut command, DEADLINE).map_err(internal)?;
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr);
        let said = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it says nothing").trim();
        let allow = format!("is 'allow {bridge}' in /etc/qemu/bridge.conf?");
        return Err(failed(ErrorCode::Unavailable, &format!("{bridge_helper}: {said}: {allow}")));
    }
    received(&ours).map_err(|e| internal(e.into()))?.ok_or_else(|| failed(ErrorCode::Internal, "none came"))
}

/// Returns the descriptor if it has been sent already.
fn received(socket: &UnixStream) -> rustix::io::Result<Option<OwnedFd>> {
    let mut byte = [0; 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, flags)?;
    let fds = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    Ok(fds.last())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bridge_that_is_not_allowed_is_refused_in_words() {
        if !BRIDGE_HELPERS.iter().any(|bridge_helper| Path::new(bridge_helper).exists()) {
            return spillway_testkit::skip("qemu-bridge-helper is not installed");
        }
        let error = tap("no-such-bridge0").unwrap_err();
        assert!(
            error.message.contains("'no-such-bridge0'") && error.message.contains("bridge.conf"),
            "{error}"
        );
    }

    #[test]
    fn what_was_not_sent_is_not_waited_for() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        assert!(received(&ours).is_err());
        drop(theirs);
        assert!(received(&ours).unwrap().is_none());
    }
}
