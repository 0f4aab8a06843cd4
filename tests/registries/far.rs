//! A store of S3 that is far and busy: what is pushed to it and pulled from it through a proxy is the image, and the signatures of
//! requests hold.

use crate::daemon_world::World;
use crate::scene::{DATA, MIB, S3, digest, write_credentials};
use spillway_testkit::store_proxy::{Origin, StoreFault, StoreModel, StoreProxy, StoreProxySettings};

/// Pushes `debian:1` to this store behind a proxy and imports it from there. A part of a test that has such a store, because a server
/// of S3 takes seconds to start.
pub fn assert_goes_through_a_proxy(golden: &World, s3: &S3) {
    let settings = StoreProxySettings::new(Origin::http(&s3.server.url).unwrap());
    let model = StoreModel {
        latency_ns: 5_000_000,
        bandwidth_bytes: 1 << 30,
        faults: [(StoreFault::Status503, 0.3)].into(),
        next: vec![StoreFault::Status503, StoreFault::Status500],
        at: "/chunks/".into(),
        ..StoreModel::default()
    };
    let proxy = StoreProxy::start(StoreProxySettings { model, ..settings }).unwrap();
    s3.add_at(golden, "far", "s3://images/far", &proxy.url());
    let pushed = golden.json(&["image", "push", "debian:1", "far"]);
    assert_eq!(pushed["sent_chunks"], 8, "{pushed}");
    let figures = proxy.figures();
    assert!(figures.requests["PUT"] >= 11 && figures.received_bytes > 3 * MIB, "{figures:?}");
    // A body that is cut is asked for again.
    proxy.set_model(StoreModel { next: vec![StoreFault::CutBody], ..proxy.model() }).unwrap();
    proxy.clear_figures();
    golden.ok(&["image", "import", "copy", "--from", "far/debian:1"]);
    assert_eq!(digest(golden, "copy", 1), digest(golden, "debian", 1));
    let figures = proxy.figures();
    assert_eq!((figures.faults[&StoreFault::CutBody], figures.store_failures), (1, 0), "{figures:?}");
    let chunks = figures.gets.keys().filter(|path| path.contains("/chunks/")).count();
    assert_eq!(chunks, DATA.len(), "zeroes are not fetched: {figures:?}");
    // Credentials that the store refuses are refused through the proxy, too.
    let wrong = write_credentials(golden, "wrong", "anothersecret");
    let wrong = wrong.display().to_string();
    let add = [
        "registry",
        "add",
        "wrong",
        "s3://images/golden",
        "--endpoint",
        &proxy.url(),
        "--credentials",
        &wrong,
    ];
    let (code, _, err) = golden.spillway(&add);
    assert_eq!(code != 0, s3.checks, "{err}");
}
