//! Real file systems on loop devices, and a persistent disk that is served on one.
//!
//! Owns mounting. Invariant: what it mounted is unmounted when the value goes, also when a test fails.

use super::{Server, World, alive, spillway, until};
use rustix::process::Signal;
use rustix::thread::{UnshareFlags, unshare_unsafe};
use spillway_testkit::{Driver, Shape};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Length of a volume: what XFS needs, and some.
pub const VOLUME_BYTES: u64 = 512 << 20;

/// Whether a command ended well; its words are the test's.
pub fn runs(command: &mut Command) -> bool {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    print!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    output.status.success()
}

/// From now on nobody else sees what this thread and its children mount. Without this, a process that takes a mount namespace of its own
/// keeps what is mounted at that moment, and its loop device, after it was unmounted here: the next mount would find these again, with
/// what they had before.
pub fn mount_for_this_thread_alone() {
    #[expect(unsafe_code, reason = "a thread's mounts are no memory")]
    // SAFETY: descriptors stay shared.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.unwrap();
    assert!(runs(Command::new("mount").args(["--make-rprivate", "/"])));
}

/// A file system in a file, mounted or not.
pub struct Volume {
    pub image: PathBuf,
    pub at: PathBuf,
}

impl Volume {
    pub fn of(world: &World, name: &str) -> Volume {
        let volume = Volume { image: world.path(&format!("{name}.img")), at: world.path(name) };
        std::fs::create_dir(&volume.at).unwrap();
        volume
    }

    pub fn make(&self, kind: &str) {
        File::create(&self.image).unwrap().set_len(VOLUME_BYTES).unwrap();
        let quiet = Command::new(format!("mkfs.{kind}")).arg("-q").arg(&self.image).output();
        assert!(quiet.unwrap().status.success(), "mkfs.{kind}");
    }

    pub fn mount(&self) -> bool {
        // XFS would not mount a copy beside its original.
        ["loop", "loop,nouuid"].iter().any(|options| {
            let mut mount = Command::new("mount");
            runs(mount.args(["-o", options]).arg(&self.image).arg(&self.at))
        })
    }

    /// As soon as the last process that had a file open is gone.
    pub fn unmount(&self) {
        until("it is unmounted", || Command::new("umount").arg(&self.at).output().unwrap().status.success());
    }

    pub fn disk(&self) -> PathBuf {
        self.at.join("disk")
    }

    /// What the device has now, as another volume, with its journal to be replayed.
    pub fn copied(&self, to: &Volume) {
        assert!(runs(Command::new("cp").arg("--sparse=always").arg(&self.image).arg(&to.image)));
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.at).output();
    }
}

/// Serves the world's image with this file, in mode `persistent`.
pub fn serve(world: &World, disk: &Path) -> (Server, Driver) {
    let mut command = spillway();
    command.args(["serve", "--mode", "persistent", "--image-id", "golden:1"]);
    command.arg("--image").arg(world.path("base.raw")).arg("--disk").arg(disk);
    command.arg("--vhost-user").arg(world.path("vhost")).arg("--control").arg(world.path("control"));
    let server = Server::start(&mut command);
    let shape = Shape { depth: 16, request_bytes: 4096, ..Shape::default() };
    (server, Driver::connect_with(&world.path("vhost"), shape).unwrap())
}

/// Supervisor and worker at once.
pub fn kill(mut server: Server) {
    let pids = [server.pid(), server.worker_pid()];
    pids.iter().for_each(|pid| rustix::process::kill_process(*pid, Signal::KILL).unwrap());
    server.child.wait().unwrap();
    until("the worker is dead", || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pids[1].as_raw_nonzero()));
        !alive(pids[1]) || stat.map_or(true, |stat| stat.rsplit_once(')').unwrap().1.starts_with(" Z"))
    });
}
