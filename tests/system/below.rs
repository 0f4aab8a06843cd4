//! A disk below the overflow, with a file system, whose every read and write can be made to take long or to fail.
//!
//! Owns ext4 on a loop device, on a file of nbdfuse, on nbdkit, into whose preads and pwrites strace steps. What
//! happens is below the kernel's block layer: it meets either engine of the worker, and what a dead worker had begun.
//! (dm-delay and dm-flakey would do; many kernels lack them. strace cannot step into an io_uring's operations, and on the
//! worker it would hold up calls that have not begun, which die with it.) It can be begun and ended at any time, and a
//! worker that is new need not be caught first.

use crate::world::{PATIENCE, World, succeeds};
use rustix::process::geteuid;
use spillway_testkit::process::wait_until;
use spillway_testkit::{Server, skip};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The programs that it needs.
pub const PROGRAMS: [&str; 4] = ["strace", "nbdkit", "nbdfuse", "mkfs.ext4"];

/// A mounted file system whose disk does as it is told.
pub struct Below {
    /// Where it is mounted; nowhere once it has been hidden.
    dir: Option<PathBuf>,
    nbdfuse: Server,
    nbdkit: Server,
}

impl Below {
    /// None: it cannot be had here, which has been said. Without a journal the file system lives on when its own
    /// writes fail.
    pub fn new(world: &World, bytes: u64, has_journal: bool) -> Option<Below> {
        if !geteuid().is_root() {
            skip("only root can mount a disk that is slow or fails");
            return None;
        }
        if !PathBuf::from("/dev/fuse").exists() || !PathBuf::from("/dev/loop-control").exists() {
            skip("a disk that is slow or fails needs FUSE and loop devices, which this kernel lacks");
            return None;
        }
        let place = tempfile::Builder::new().prefix("below").tempdir_in(world.dir()).unwrap().keep();
        let [image, socket, file, dir] = ["disk.img", "disk.sock", "disk", "mounted"].map(|n| place.join(n));
        std::fs::File::create(&image).unwrap().set_len(bytes).unwrap();
        std::fs::File::create(&file).unwrap();
        std::fs::create_dir(&dir).unwrap();
        // Nothing that the kernel would go on writing by itself.
        let options = ["-q", "-F", "-b", "4096", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0"];
        let journal = if has_journal { "has_journal" } else { "^has_journal" };
        succeeds(Command::new("mkfs.ext4").args(options).args(["-O", journal]).arg(&image));

        let text = |path: &PathBuf| path.display().to_string();
        let start = |name: &str, arguments: &[String]| {
            Server::start(name, name, arguments, None, &place.join(format!("{name}.log"))).unwrap()
        };
        let serve = ["-f", "-t", "8", "-U", &text(&socket), "file", &text(&image)].map(String::from);
        let mut nbdkit = start("nbdkit", &serve);
        nbdkit.wait_for(&socket, PATIENCE).unwrap();
        let uri = format!("nbd+unix:///?socket={}", socket.display());
        let nbdfuse = start("nbdfuse", &["-C".into(), "16".into(), text(&file), uri]);
        let below = Below { dir: Some(dir.clone()), nbdfuse, nbdkit };
        let there = wait_until(PATIENCE, || (file.metadata().ok()?.len() == bytes).then_some(()));
        assert!(there.is_some(), "{}", below.nbdfuse.tail());

        let mut losetup = Command::new("losetup");
        let device = succeeds(losetup.args(["--find", "--show", "--direct-io=on"]).arg(&file));
        let mounted =
            Command::new("mount").args(["-t", "ext4", "-o", "noatime", device.trim()]).arg(&dir).status();
        // Its last user takes the device along, and that one the file.
        succeeds(Command::new("losetup").args(["--detach", device.trim()]));
        succeeds(Command::new("umount").arg("--lazy").arg(&file));
        assert!(mounted.unwrap().success());
        Some(below)
    }

    /// Where it is mounted.
    pub fn dir(&self) -> &str {
        self.dir.as_ref().unwrap().to_str().unwrap()
    }

    /// Nobody finds it any more; it goes with who uses it now, however that ends.
    pub fn hide(&mut self) {
        if let Some(dir) = self.dir.take() {
            succeeds(Command::new("umount").arg("--lazy").arg(dir));
        }
    }

    /// These calls (`pread64`, `pwrite64`) of each of nbdkit's threads end otherwise until the value is dropped; `how` is
    /// strace's, and its words go to `log`.
    pub fn inject(&self, calls: &str, how: &str, log: &Path) -> Server {
        let arguments = [
            "-f".to_string(),
            format!("--attach={}", self.nbdkit.pid()),
            format!("--trace={calls}"),
            format!("--inject={calls}:{how}"),
        ];
        let strace = Server::start("strace", "strace", &arguments, None, log).unwrap();
        let attached = wait_until(PATIENCE, || {
            std::fs::read_to_string(log).is_ok_and(|log| log.contains(" attached")).then_some(())
        });
        assert!(attached.is_some(), "{}", strace.tail());
        strace
    }
}

impl Drop for Below {
    fn drop(&mut self) {
        self.hide();
        // It ends when the last user has gone.
        let _ = self.nbdfuse.wait(PATIENCE);
    }
}
