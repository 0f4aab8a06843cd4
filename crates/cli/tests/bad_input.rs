//! Disks that cannot be served: a message that says what, where and what to do, a stable exit code, and no file
//! left behind. The real program, real file systems, real users.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod common;

use common::{World, is_root, refuses, spillway};
use spillway_testkit::skip;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// Asserts a refusal that leaves the folder as it was.
#[track_caller]
fn refused(world: &World, command: &mut Command, code: i32, words: &[&str]) {
    let before = world.left();
    refuses(command, code, words);
    assert_eq!(world.left(), before, "left behind");
}

#[test]
fn an_image_that_is_missing_or_wrong() {
    let world = World::new();
    let image = |name: &str| {
        let mut command = spillway();
        command.arg("serve").arg("--nbd").arg(world.path("nbd")).arg("--image").arg(world.path(name));
        command.arg("--overflow-dir").arg(world.dir.path());
        command
    };
    refused(&world, &mut image("none.raw"), 66, &["none.raw", "does not exist", "--image"]);

    std::fs::create_dir(world.path("dir.raw")).unwrap();
    refused(&world, &mut image("dir.raw"), 66, &["is a folder"]);

    std::fs::write(world.path("disk.img"), [0; 4096]).unwrap();
    refused(&world, &mut image("disk.img"), 66, &["disk.img", "--format raw"]);

    std::fs::write(world.path("odd.raw"), [0; 1000]).unwrap();
    refused(&world, &mut image("odd.raw"), 66, &["odd.raw", "not a multiple of 512", "truncate"]);

    std::fs::write(world.path("empty.raw"), []).unwrap();
    refused(&world, &mut image("empty.raw"), 66, &["empty.raw", "is empty"]);

    std::fs::File::create(world.path("vast.raw")).unwrap().set_len((4 << 40) + 512).unwrap();
    refused(&world, &mut image("vast.raw"), 66, &["vast.raw", "4.0 TiB", "smaller image"]);

    std::fs::write(world.path("really.raw"), *b"QFI\xfb\x00\x00\x00\x03 and more, to fill a header").unwrap();
    refused(&world, &mut image("really.raw"), 66, &["qcow2", "--format"]);

    refused(&world, image("base.raw").args(["--format", "qcow2"]), 66, &["base.raw"]);
    refused(&world, image("base.raw").args(["--size", "1M"]), 2, &["smaller than the base image"]);
    refused(&world, image("base.raw").args(["--size", "16777217"]), 2, &["multiple of 512"]);
    refused(&world, image("base.raw").args(["--size", "5T"]), 2, &["4 TiB"]);
}

#[test]
fn limits_that_are_too_small() {
    let world = World::new();
    refused(&world, world.serve().args(["--ram", "4K"]), 2, &["--ram", "64K to 4T"]);
    refused(&world, world.serve().args(["--overflow", "1M"]), 2, &["--overflow", "16M to 4T"]);
}

#[test]
fn more_ram_than_the_host_has() {
    let world = World::new();
    let command = &mut world.serve();
    refused(&world, command.args(["--ram", "4T"]), 75, &["4.0 TiB", "MemAvailable", "--ram"]);
}

#[test]
fn more_ram_than_the_control_group_has() {
    if !is_root() {
        return skip("a control group can be made by root only");
    }
    // Where the memory controller is, in either version; its name is this test's alone.
    let name = format!("spillway-test-{}", std::process::id());
    let v2 = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    let (dir, limit) = match v2 {
        true => (Path::new("/sys/fs/cgroup").join(&name), "memory.max"),
        false => (Path::new("/sys/fs/cgroup/memory").join(&name), "memory.limit_in_bytes"),
    };
    if std::fs::create_dir(&dir).is_err() || std::fs::write(dir.join(limit), "67108864").is_err() {
        let _ = std::fs::remove_dir(&dir);
        return skip("this host lets nobody make a memory control group");
    }
    let world = World::new();
    let serve = world.serve();
    let mut command = Command::new("bash");
    command.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(dir.join("cgroup.procs"));
    command.arg(serve.get_program()).args(serve.get_args()).args(["--ram", "128M"]);
    refused(&world, &mut command, 75, &["128.0 MiB", "control group", &name, "limit 64.0 MiB"]);
    std::fs::remove_dir(&dir).unwrap();
}

#[test]
fn an_overflow_directory_that_cannot_be_used() {
    let world = World::new();
    let at = |dir: &Path| {
        let mut command = spillway();
        command.arg("serve").arg("--nbd").arg(world.path("nbd")).arg("--image").arg(world.path("base.raw"));
        command.arg("--overflow-dir").arg(dir);
        command
    };
    for mode in ["ram+overflow", "overflow", "direct"] {
        let none = world.path("none");
        refused(&world, at(&none).args(["--mode", mode]), 73, &["none", "no such file", "--overflow-dir"]);
        refused(
            &world,
            at(Path::new("/dev/shm")).args(["--mode", mode]),
            73,
            &["/dev/shm", "tmpfs", "--mode ram"],
        );
        let file = world.path("base.raw");
        refused(&world, at(&file).args(["--mode", mode]), 73, &["not a folder"]);
    }
}

#[test]
fn an_overflow_directory_without_space() {
    if !is_root() {
        return skip("a small file system can be mounted by root only");
    }
    let world = World::new();
    let (image, mount) = (world.path("small.img"), world.path("small"));
    std::fs::create_dir(&mount).unwrap();
    std::fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
    let run = |command: &mut Command| command.output().is_ok_and(|o| o.status.success());
    assert!(run(Command::new("mke2fs").args(["-q", "-F", "-t", "ext4"]).arg(&image)), "mke2fs");
    if !run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&mount)) {
        return skip("this host mounts no loop device");
    }
    std::fs::write(mount.join("filler"), vec![1; 6 << 20]).unwrap();
    let mut command = spillway();
    command.arg("serve").arg("--nbd").arg(world.path("nbd")).arg("--image").arg(world.path("base.raw"));
    command.arg("--overflow-dir").arg(&mount);
    let refusal = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        refused(&world, &mut command, 73, &["small", "are free", "make space"]);
        assert_eq!(std::fs::read_dir(&mount).unwrap().count(), 2, "filler and lost+found");
    }));
    assert!(run(Command::new("umount").arg(&mount)), "umount");
    refusal.unwrap();
}

#[test]
fn what_this_user_may_not_do() {
    if !is_root() {
        return skip("only root can act as another user");
    }
    let world = World::new();
    let binary = world.program_for_all();
    let open = world.path("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, PermissionsExt::from_mode(0o777)).unwrap();
    let nobody = |image: &str, overflow: &Path, nbd: &Path| {
        let mut command = Command::new(&binary);
        command.uid(65534).gid(65534).arg("serve");
        command
            .arg("--image")
            .arg(world.path(image))
            .arg("--overflow-dir")
            .arg(overflow)
            .arg("--nbd")
            .arg(nbd);
        command
    };
    std::fs::write(world.path("secret.raw"), [0; 4096]).unwrap();
    std::fs::set_permissions(world.path("secret.raw"), PermissionsExt::from_mode(0o600)).unwrap();
    let nbd = open.join("nbd");
    refused(&world, &mut nobody("secret.raw", &open, &nbd), 77, &["secret.raw", "may not be read"]);
    refused(
        &world,
        &mut nobody("base.raw", world.dir.path(), &nbd),
        77,
        &["permission denied", "--overflow-dir"],
    );
    refused(&world, &mut nobody("base.raw", &open, &world.path("nbd")), 77, &["permission denied", "nbd"]);
    assert_eq!(std::fs::read_dir(&open).unwrap().count(), 0);

    let control = world.path("control");
    let _held = UnixListener::bind(&control).unwrap();
    std::fs::set_permissions(&control, PermissionsExt::from_mode(0o600)).unwrap();
    let mut stats = Command::new(&binary);
    refuses(
        stats.uid(65534).gid(65534).arg("stats").arg(&control),
        77,
        &["permission denied", "--socket-group"],
    );
}

#[test]
fn a_socket_that_cannot_be_made() {
    let world = World::new();
    let held = UnixListener::bind(world.path("nbd")).unwrap();
    refused(&world, &mut world.serve(), 73, &["nbd", "another process serves it", "choose another path"]);
    UnixStream::connect(world.path("nbd")).expect("it was left alone");
    drop(held);
    std::fs::remove_file(world.path("nbd")).unwrap();

    std::fs::write(world.path("nbd"), "precious").unwrap();
    refused(&world, &mut world.serve(), 73, &["not a socket"]);
    assert_eq!(std::fs::read_to_string(world.path("nbd")).unwrap(), "precious");
    std::fs::remove_file(world.path("nbd")).unwrap();

    // One that fails takes with it those that were made before.
    std::fs::write(world.path("control"), "").unwrap();
    refused(&world, world.serve().arg("--control").arg(world.path("control")), 73, &["control"]);

    let long = world.path(&"x".repeat(120));
    refused(&world, world.serve().arg("--control").arg(long), 73, &["the most is 107"]);
    let nowhere = world.path("no/such/dir/c");
    refused(&world, world.serve().arg("--control").arg(nowhere), 73, &["make its folder"]);
    refused(&world, world.serve().args(["--socket-group", "no-such-group"]), 2, &["no-such-group"]);
}

#[test]
fn what_the_host_has_run_out_of_is_said() {
    let world = World::new();
    let mut command = Command::new("bash");
    // Enough for the image and the signals, and not for the disk's memory, whatever this process has inherited.
    command.args(["-c", "exec 3<&- 4<&-; ulimit -n 5; exec \"$0\" \"$@\""]).arg(spillway().get_program());
    command.args(["serve", "--mode", "ram", "--image"]).arg(world.path("base.raw"));
    command.arg("--nbd").arg(world.path("nbd"));
    refused(&world, &mut command, 70, &["too many open files", "ulimit -a"]);
}

#[test]
fn a_limit_on_file_sizes_is_said_and_not_run_into() {
    let world = World::new();
    let serve = world.serve();
    let mut command = Command::new("bash");
    command
        .args(["-c", "ulimit -f 1024; exec \"$0\" \"$@\""])
        .arg(serve.get_program())
        .args(serve.get_args());
    refused(&world, &mut command, 2, &["ulimit -f unlimited"]);
}
