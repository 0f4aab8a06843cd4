//! `stats --dirty`: what was written where, as somebody sees it who looks for what filled a cache.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod common;

use common::{Server, World, finishes, qemu_io, spillway, until};
use rustix::process::Signal;
use serde_json::{Value, json};

/// Runs `stats --dirty` with more arguments.
fn dirty(world: &World, more: &[&str]) -> String {
    let (code, out, err) =
        finishes(spillway().arg("stats").arg(world.path("control")).arg("--dirty").args(more));
    assert_eq!((code, err.as_str()), (0, ""));
    out
}

fn as_json(world: &World, more: &[&str]) -> Value {
    serde_json::from_str(&dirty(world, &[&["--json"], more].concat())).unwrap()
}

#[test]
fn it_lists_what_was_written_most_and_a_reset_forgets_it() {
    for mode in ["ram+overflow", "overflow", "direct"] {
        let world = World::new();
        let mut command = world.serve();
        command.arg("--control").arg(world.path("control")).args(["--mode", mode]);
        let server = Server::start(&mut command);
        assert_eq!(as_json(&world, &[])["ranges"], json!([]), "{mode}");
        assert_eq!(dirty(&world, &[]).lines().count(), 1, "{mode}");
        // Regions 3 and 4 in full, region 6 twice with the same 64 KiB, two sectors of region 0; reads, zeroes
        // and discards are no writes.
        qemu_io(
            &world,
            &[
                "write -P 1 6M 4M",
                "write -P 2 12M 64k",
                "write -P 3 12M 64k",
                "write -P 4 1k 1k",
                "read 8M 4M",
            ],
        );
        qemu_io(&world, &["write -z 10M 1M", "discard 14M 2M", "flush"]);
        let ranges = [
            json!({"offset_bytes": 6 << 20, "length_bytes": 4 << 20, "written_bytes": 4 << 20}),
            json!({"offset_bytes": 12 << 20, "length_bytes": 2 << 20, "written_bytes": 128 << 10}),
            json!({"offset_bytes": 0, "length_bytes": 2 << 20, "written_bytes": 4096}),
        ];
        let expected = json!({
            "schema": 1, "serial": server.report["serial"], "generation": 1, "size_bytes": 16 << 20,
            "region_bytes": 2 << 20, "written_bytes": (4 << 20) + (128 << 10) + 4096, "ranges_total": 3,
            "ranges": ranges,
        });
        assert_eq!(as_json(&world, &[]), expected, "{mode}");
        assert_eq!(as_json(&world, &["--top", "1"])["ranges"], json!([ranges[0]]), "{mode}");
        let table = dirty(&world, &["--top", "2"]);
        let lines: Vec<String> =
            table.lines().map(|l| l.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(
            lines[3..5],
            ["6291456 4.0 MiB 1,024 4.0 MiB 96.9%", "12582912 2.0 MiB 32 128.0 KiB 3.0%"]
        );
        assert!(lines[5].starts_with("1 more with 4.0 KiB"), "{table}");

        until("the clients have gone", || {
            let (_, out, _) = finishes(spillway().arg("stats").arg(world.path("control")).arg("--json"));
            serde_json::from_str::<Value>(&out).unwrap()["clients"] == 0
        });
        let (code, _, err) = finishes(spillway().arg("reset").arg(world.path("control")));
        assert_eq!(code, 0, "{mode}: {err}");
        let after = as_json(&world, &[]);
        assert_eq!((&after["generation"], &after["written_bytes"]), (&json!(2), &json!(0)), "{mode}");
        qemu_io(&world, &["write -P 5 8M 4k"]);
        assert_eq!(as_json(&world, &[])["ranges"][0]["written_bytes"], 4096, "{mode}: nothing of before");
        assert_eq!(server.end(Signal::TERM).0, 0);
    }
}

#[test]
fn a_limit_that_cannot_be_is_refused_by_the_server_too() {
    use std::io::{BufRead, BufReader, Write};
    let world = World::new();
    let _server = Server::start(world.serve().arg("--control").arg(world.path("control")));
    let mut control = std::os::unix::net::UnixStream::connect(world.path("control")).unwrap();
    let asked = ["0", "4097", "-1", "1", "4096"];
    for limit in asked {
        writeln!(control, "{{\"command\":\"dirty\",\"limit\":{limit}}}").unwrap();
    }
    writeln!(control, "{{\"command\":\"dirty\"}}").unwrap();
    let mut lines = BufReader::new(control).lines();
    for limit in asked {
        let line = lines.next().unwrap().unwrap();
        assert_eq!(line.contains("\"invalid\""), ["0", "4097", "-1"].contains(&limit), "{limit}: {line}");
    }
    assert!(lines.next().unwrap().unwrap().starts_with("{\"ok\":{"), "there is a default");
}
