//! What is free when `serve` has ended: the image, the overflow file's space, the file system that they lie on. Whoever
//! waited for the end may change the image or unmount at once.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod common;

use common::{Server, World, finishes, is_root, qemu_io};
use rustix::process::Signal;
use spillway_testkit::process::send_signal;
use spillway_testkit::skip;
use std::path::Path;
use std::process::Command;

const ENGINES: [&str; 2] = ["io_uring", "threads"];

fn succeeds(command: &mut Command) {
    let (code, out, err) = finishes(command);
    assert_eq!(code, 0, "{command:?}: {out}{err}");
}

/// A program of QEMU's writes to it: which it refuses while anybody has it locked as an image.
#[track_caller]
fn can_be_written(image: &Path) {
    succeeds(Command::new("qemu-io").args(["-f", "raw", "-c", "write -P 9 0 4k"]).arg(image));
}

#[test]
fn the_image_can_be_written_when_serve_has_ended() {
    for engine in ENGINES {
        let world = World::new();
        for _ in 0..5 {
            let server = Server::start(world.serve().env("SPILLWAY_ENGINE", engine));
            qemu_io(&world, &["write -P 1 1M 1M", "read -P 1 1M 1M"]);
            assert_eq!(server.end(Signal::TERM).0, 0);
            can_be_written(&world.path("base.raw"));
        }
    }
}

/// A second signal is for those who do not want to wait: the worker, which has stopped to run, is killed.
#[test]
fn the_image_can_be_written_when_the_worker_was_killed() {
    let world = World::new();
    for _ in 0..5 {
        let mut server = Server::start(&mut world.serve());
        send_signal(server.worker_pid(), Signal::STOP).unwrap();
        rustix::process::kill_process(server.pid(), Signal::TERM).unwrap();
        // Only once the first one was taken is the next one a second one: the sockets go then.
        common::until("it has begun to stop", || !world.path("nbd").exists());
        rustix::process::kill_process(server.pid(), Signal::TERM).unwrap();
        assert_eq!(server.wait().0, 0);
        can_be_written(&world.path("base.raw"));
    }
}

#[test]
fn the_file_system_can_be_unmounted_when_serve_has_ended() {
    if !is_root() {
        return skip("a file system can be mounted by root only");
    }
    let world = World::new();
    let (image, mount) = (world.path("fs.img"), world.path("fs"));
    std::fs::create_dir(&mount).unwrap();
    std::fs::File::create(&image).unwrap().set_len(256 << 20).unwrap();
    succeeds(Command::new("mke2fs").args(["-q", "-F", "-t", "ext4"]).arg(&image));
    let mounts =
        || Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&mount).status().unwrap().success();
    for (mode, engine) in ["ram+overflow", "overflow", "direct", "persistent", "ephemeral"]
        .into_iter()
        .flat_map(|mode| ENGINES.map(|engine| (mode, engine)))
    {
        if !mounts() {
            return skip("this host mounts no loop device");
        }
        // Mode ephemeral takes it away.
        if !mount.join("base.raw").exists() {
            succeeds(Command::new("cp").arg(world.path("base.raw")).arg(mount.join("base.raw")));
        }
        let mut serve = common::spillway();
        serve.args(["serve", "--mode", mode]).env("SPILLWAY_ENGINE", engine);
        serve.arg("--nbd").arg(world.path("nbd"));
        match mode {
            "ephemeral" => serve.arg("--disk").arg(mount.join("base.raw")),
            "persistent" => {
                serve.arg("--image").arg(mount.join("base.raw")).arg("--disk").arg(mount.join("disk"))
            }
            _ => serve.arg("--image").arg(mount.join("base.raw")).arg("--overflow-dir").arg(&mount),
        };
        if mode == "ram+overflow" {
            serve.args(["--ram", "1M", "--overflow", "64M"]);
        }
        let server = Server::start(&mut serve);
        qemu_io(&world, &["write -P 1 0 8M", "read -P 1 0 8M"]);
        let (code, text) = server.end(Signal::TERM);
        assert_eq!(code, 0, "{mode}, {engine}: {text}");
        // Lazily only if it is busy: nothing is to be left mounted by a test that has failed.
        let free = Command::new("umount").arg(&mount).status().unwrap().success();
        assert!(
            free || !Command::new("umount").arg("--lazy").arg(&mount).status().unwrap().success(),
            "{mode}, {engine}: the file system is busy when serve has ended"
        );
        assert!(free, "{mode}, {engine}: umount");
    }
}
