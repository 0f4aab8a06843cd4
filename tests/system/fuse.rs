//! A file system whose program opens its one file for whoever asks, and answers no question of some processes about it: what
//! a VMM could hand over a descriptor of. All others are answered, as each child of this process closes the file too. Owns the
//! mount; never leaves it behind.
//!
//! Invariant: what waits for the program is let go, with an error, when the value is dropped.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::JoinHandle;

// linux/fuse.h.
const LOOKUP: u32 = 1;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const ROOT: u64 = 1;

pub struct Fuse {
    dir: PathBuf,
    program: Option<JoinHandle<()>>,
    /// Closed after the mount has gone.
    file: Option<File>,
}

impl Fuse {
    /// Mounts it, for all but these processes, and opens its file. The error says what is lacking.
    pub fn mount(dir: &Path, deaf_to: Vec<u32>) -> Result<Fuse, String> {
        let explain = |e: std::io::Error| format!("/dev/fuse: {e}");
        let device = File::options().read(true).write(true).open("/dev/fuse").map_err(explain)?;
        std::fs::create_dir(dir).unwrap();
        let options = "fd=0,rootmode=40000,user_id=0,group_id=0";
        let mut mount = Command::new("mount");
        mount.args(["-i", "-t", "fuse", "-o", options, "mute"]).arg(dir);
        let done = mount.stdin(device.try_clone().unwrap()).output().unwrap();
        if !done.status.success() {
            return Err(format!("a FUSE cannot be mounted: {}", String::from_utf8_lossy(&done.stderr)));
        }
        let program = Some(std::thread::spawn(move || answer(device, &deaf_to)));
        let mut fuse = Fuse { dir: dir.into(), program, file: None };
        fuse.file = Some(File::options().read(true).write(true).open(dir.join("file")).unwrap());
        Ok(fuse)
    }

    /// Those processes can neither ask it anything nor close it.
    pub fn file(&self) -> &File {
        self.file.as_ref().expect("opened with the mount")
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        // By force: all that waits ends.
        let _ = Command::new("umount").args(["-i", "-f", "-l"]).arg(&self.dir).status();
        let _ = self.program.take().map(JoinHandle::join);
    }
}

/// Until the connection is cut.
fn answer(mut device: File, deaf_to: &[u32]) {
    let mut request = vec![0; 1 << 20];
    while let Ok(n) = device.read(&mut request) {
        let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
        let long = |at: usize| u64::from_ne_bytes(request[at..at + 8].try_into().unwrap());
        assert!(n >= 40, "a request without a header");
        // The kernel names the thread that asks.
        let asks = |process: &u32| Path::new(&format!("/proc/{process}/task/{}", word(32))).exists();
        if deaf_to.iter().any(asks) {
            continue;
        }
        let payload = match (word(4), long(16)) {
            // Version 7.31, writes of 4096 bytes.
            (INIT, _) => {
                [7u32, 31, 0, 0, 0, 4096, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0].map(u32::to_ne_bytes).concat()
            }
            (LOOKUP, ROOT) => {
                [[2u64, 0, 0, 0, 0].map(u64::to_ne_bytes).concat(), attributes(2, 0o100_666)].concat()
            }
            (FLUSH, _) => vec![],
            (GETATTR, ROOT) => {
                [[0u64, 0].map(u64::to_ne_bytes).concat(), attributes(ROOT, 0o40_777)].concat()
            }
            (OPEN, _) => vec![0; 16],
            _ => continue,
        };
        let mut reply = (16 + payload.len() as u32).to_ne_bytes().to_vec();
        reply.extend(0u32.to_ne_bytes());
        reply.extend(long(8).to_ne_bytes());
        reply.extend(payload);
        if device.write_all(&reply).is_err() {
            return;
        }
    }
}

/// Of a file of 1 GiB; to be asked for anew each time.
fn attributes(inode: u64, mode: u32) -> Vec<u8> {
    let mut bytes = [inode, 1 << 30, 0, 0, 0, 0].map(u64::to_ne_bytes).concat();
    bytes.extend([0, 0, 0, mode, 1, 0, 0, 0, 4096, 0].map(u32::to_ne_bytes).concat());
    bytes
}
