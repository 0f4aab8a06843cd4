//! What the tests share: a folder on a real disk, images, and the tools of others that act as clients.

use spillway_testkit::process::wait_until;
use spillway_testkit::{Disk, Rng, Server, has_program, skip};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

pub const MIB: u64 = 1 << 20;
/// How long anything may take that is not a load.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// Within it a disk answers each request.
pub const DEADLINE: Duration = Duration::from_secs(30);
/// How long a load of fio's may take, whose every byte goes through a busy host's disk.
const LOAD: Duration = Duration::from_secs(600);

/// A folder on a disk that has O_DIRECT, removed with the value.
pub struct World {
    dir: tempfile::TempDir,
}

impl World {
    /// None: one of the programs that the test needs is missing, which has been said.
    pub fn new(programs: &[&str]) -> Option<World> {
        for program in programs {
            if !has_program(program) {
                skip(&format!("{program} is not installed: run 'make install-deps'"));
                return None;
            }
        }
        Some(World { dir: tempfile::Builder::new().prefix("spw").tempdir_in("/var/tmp").unwrap() })
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir().join(name)
    }

    /// A raw image: text that compresses, noise that does not, and nothing, in runs of 64 KiB.
    pub fn image(&self, bytes: u64) -> PathBuf {
        let path = self.path("base.raw");
        let mut rng = Rng::new(5);
        let mut content = vec![0u8; bytes as usize];
        for run in content.chunks_mut(64 << 10) {
            match rng.below(4) {
                0 => {}
                1 => run.iter_mut().enumerate().for_each(|(i, b)| *b = (i / 300 % 251) as u8 + 1),
                _ => run.as_chunks_mut().0.iter_mut().for_each(|w| *w = rng.next_u64().to_le_bytes()),
            }
        }
        std::fs::write(&path, content).unwrap();
        path
    }

    /// An image without content.
    pub fn blank(&self, bytes: u64) -> PathBuf {
        let path = self.path("blank.raw");
        std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
        path
    }

    /// The image as qcow2.
    pub fn qcow2(&self, raw: &Path, name: &str, options: &[&str]) -> PathBuf {
        let path = self.path(name);
        let mut convert = Command::new("qemu-img");
        convert.args(["convert", "-f", "raw", "-O", "qcow2"]).args(options).arg(raw).arg(&path);
        succeeds(&mut convert);
        path
    }

    pub fn serve(&self, image: &Path, options: &[&str]) -> Disk {
        let disk = Disk::start(self.dir(), image, options).unwrap();
        if !options.contains(&"ram") {
            assert_eq!(disk.report["overflow_direct"], true, "/var/tmp is to be a disk that has O_DIRECT");
        }
        disk
    }

    /// The same, with its I/O by one of the worker's two engines.
    pub fn serve_by(&self, engine: &str, image: &Path, options: &[&str]) -> Disk {
        use std::os::unix::fs::PermissionsExt;
        let program = spillway_testkit::disk::program().unwrap();
        let script = format!("#!/bin/sh\nSPILLWAY_ENGINE={engine} exec '{}' \"$@\"\n", program.display());
        let path = self.path(engine);
        std::fs::write(&path, script).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
        Disk::start_with(&path, self.dir(), image, options).unwrap()
    }

    /// fio with its nbd engine, as a child: what it reads it checks, and the first wrong byte ends it.
    pub fn fio(&self, name: &str, disk: &Disk, options: &[&str]) -> Server {
        let mut arguments: Vec<String> = [
            "--ioengine=nbd",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--do_verify=1",
            "--iodepth=16",
            "--randrepeat=1",
            "--group_reporting",
        ]
        .map(String::from)
        .to_vec();
        arguments.push(format!("--name={name}"));
        arguments.push(format!("--uri={}", disk.nbd_uri()));
        arguments.extend(options.iter().map(ToString::to_string));
        // fio leaves state files where it stands.
        let mut all = vec!["-C".to_string(), self.dir().display().to_string(), "fio".to_string()];
        all.extend(arguments);
        Server::start("fio", "env", &all, None, &self.path(&format!("{name}.log"))).unwrap()
    }
}

/// Waits until fio has ended well.
pub fn fio_ends(mut fio: Server) {
    let status = fio.wait(LOAD).unwrap();
    assert!(status.success(), "{}\n{}", fio.command, fio.tail());
}

/// Runs a command to its end, which must be a success, and returns what it said.
#[track_caller]
pub fn succeeds(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}: {text}", output.status);
    text
}

/// qemu-io on the disk, by NBD: each word one of its commands.
#[track_caller]
pub fn qemu_io(disk: &Disk, commands: &[&str]) {
    let mut qemu_io = Command::new("qemu-io");
    qemu_io.args(["-f", "raw"]).arg(disk.nbd_uri());
    commands.iter().for_each(|command| _ = qemu_io.args(["-c", command]));
    let text = succeeds(&mut qemu_io);
    assert!(!text.contains("failed") && !text.contains("error"), "{commands:?}: {text}");
}

/// Waits until nobody is connected, so that the next VMM is let in. That a driver was dropped is not enough: what another
/// test starts has its socket too, until it executes its program.
#[track_caller]
pub fn until_left(disk: &Disk) {
    until("all clients have left", disk, || disk.figure("clients").unwrap() == 0);
}

/// Waits for what must come.
#[track_caller]
pub fn until(what: &str, disk: &Disk, mut done: impl FnMut() -> bool) {
    let came = wait_until(PATIENCE, || done().then_some(()));
    assert!(came.is_some(), "not within {PATIENCE:?}: {what}\n{}", disk.log());
}
