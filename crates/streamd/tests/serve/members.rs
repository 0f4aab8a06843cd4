//! Hosts that know each other by certificates that somebody else lists, as the daemons of a fleet do.

use crate::peers::{HEDGE, NO_HEDGE, Scene, gets, hex, read_all};
use crate::scene::{Registry, Streamd};
use crate::wire::{Asker, Fake, Files, Manner};
use sha2::{Digest, Sha256};
use spillway_registry::serve::{ControlReply, ControlRequest, PeerMember, PeerOrder, PeerTrust};
use std::io::Write;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::thread;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;

/// Certificate and key of host `n`: its own, and of no authority that counts.
fn files(scene: &Scene, n: usize) -> [PathBuf; 3] {
    let [certificate, key] = ["crt", "key"].map(|end| scene.path(&format!("member-{n}.{end}")));
    if !certificate.exists() {
        let name = format!("IP:{}", scene.addresses[n].ip());
        scene.authority.sign(&name, &certificate, &key).unwrap();
    }
    [scene.authority.certificate(), certificate, key]
}

fn member(scene: &Scene, n: usize) -> PeerMember {
    let certificate = CertificateDer::from_pem_file(&files(scene, n)[1]).unwrap();
    let digest: [u8; 32] = Sha256::digest(&certificate).into();
    PeerMember { address: scene.name(n), certificate: hex(&digest) }
}

/// Starts host `n`, which knows nobody.
fn host(scene: &Scene, registry: &Registry, n: usize, hedge_milliseconds: u64) -> Streamd {
    let [_, certificate, key] = files(scene, n);
    let order =
        PeerOrder { trust: PeerTrust::Members, certificate, key, ..scene.order(n, 0, hedge_milliseconds) };
    scene.start(registry, n, order)
}

fn tell_text(host: &Streamd, text: &[u8]) -> ControlReply {
    let mut list = tempfile::tempfile().unwrap();
    list.write_all(text).unwrap();
    std::io::Seek::rewind(&mut list).unwrap();
    host.control.control(&ControlRequest::Members, &[list.as_fd()])
}

fn tell(host: &Streamd, members: &[PeerMember]) {
    assert_eq!(tell_text(host, &serde_json::to_vec(members).unwrap()), ControlReply::Done);
}

fn asker(scene: &Scene, by: usize, of: usize) -> Asker {
    Asker::connect(scene.addresses[of], scene.with(&files(scene, by)), true)
}

#[test]
fn members_ask_the_store_once_for_each_chunk() {
    let (scene, registry) = (Scene::new(), Registry::new(&[1]));
    let hosts: Vec<_> = (0..3).map(|n| host(&scene, &registry, n, NO_HEDGE)).collect();
    let members: Vec<_> = (0..3).map(|n| member(&scene, n)).collect();
    hosts.iter().for_each(|host| tell(host, &members));
    thread::scope(|scope| {
        hosts.iter().for_each(|host| _ = scope.spawn(|| read_all(host, &registry.images[0])));
    });
    let distinct = u64::from(registry.images[0].data_chunks());
    let total = gets(&registry).values().sum::<u64>();
    assert!(total * 100 <= distinct * 105, "{total} requests for {distinct} chunks");
    let sum = |of: fn(&spillway_registry::serve::CacheFigures) -> u64| -> u64 {
        hosts.iter().map(|host| of(&host.figures())).sum()
    };
    assert_eq!((sum(|of| of.store_chunks), sum(|of| of.peer_chunks)), (total, 3 * distinct - total));
}

#[test]
fn who_is_no_member_is_not_answered_and_not_asked() {
    let (scene, registry) = (Scene::new(), Registry::new(&[1]));
    let image = &registry.images[0];
    let have = format!("/have/{}", hex(&image.root));
    let first = host(&scene, &registry, 0, HEDGE);
    assert!(asker(&scene, 1, 0).ask("GET", &have, "").is_none(), "nobody is a member yet");
    tell(&first, &[member(&scene, 0), member(&scene, 1)]);
    let mut open = asker(&scene, 1, 0);
    assert_eq!(open.get(&have, "").status, 200);
    // Its certificate is of the same authority; or it has none; or a member's without its key.
    assert!(asker(&scene, 2, 0).ask("GET", &have, "").is_none());
    let of_member = files(&scene, 1);
    let mut nameless = Asker::connect(scene.addresses[0], scene.with(&of_member), false);
    assert!(nameless.ask("GET", &have, "").is_none());
    let [authority, certificate, _] = &of_member;
    let [_, _, key] = &files(&scene, 2);
    let stolen = Files { authority, certificate, key };
    assert!(Asker::with_key_of_another(scene.addresses[0], stolen).ask("GET", &have, "").is_none());
    let own = Files { key: &of_member[2], ..stolen };
    assert_eq!(Asker::with_key_of_another(scene.addresses[0], own).get(&have, "").status, 200);
    // Another one listens at the address of a member.
    let fake = Fake::start(scene.addresses[1], scene.with(&files(&scene, 2)), Manner::Right, image);
    read_all(&first, image);
    assert_eq!((fake.asked().len(), first.figures().peer_chunks), (0, 0));
    // A member that is removed is refused from its next request on.
    tell(&first, &[member(&scene, 0)]);
    assert_eq!(open.get(&have, "").status, 403);
    assert!(asker(&scene, 1, 0).ask("GET", &have, "").is_none());
}

#[test]
fn the_list_changes_while_disks_read() {
    let (scene, registry) = (Scene::new(), Registry::new(&[1, 2]));
    let hosts: Vec<_> = (0..2).map(|n| host(&scene, &registry, n, HEDGE)).collect();
    read_all(&hosts[0], &registry.images[0]);
    read_all(&hosts[1], &registry.images[0]);
    assert_eq!(hosts[1].figures().peer_chunks, 0);
    let members = [member(&scene, 0), member(&scene, 1)];
    hosts.iter().for_each(|host| tell(host, &members));
    read_all(&hosts[0], &registry.images[1]);
    read_all(&hosts[1], &registry.images[1]);
    let came = hosts[1].figures().peer_chunks;
    assert!(came > 0);
    // One that cannot be used keeps nobody from the others, and nothing is taken of a list that is none.
    let wrong = |address: &str, certificate: &str| PeerMember {
        address: address.into(),
        certificate: certificate.into(),
    };
    let digest = &members[0].certificate;
    let odd = [wrong("http://x", digest), wrong("https://x/y", digest), wrong(&scene.name(2), "no digest")];
    tell(&hosts[0], &[&odd[..], &members].concat());
    let have = format!("/have/{}", hex(&registry.images[0].root));
    assert_eq!(asker(&scene, 1, 0).get(&have, "").status, 200);
    let many = vec![members[0].clone(); 1025];
    let long = vec![b' '; (1 << 20) + 1];
    for (text, why) in [
        (&b"{}"[..], "the list of members"),
        (&serde_json::to_vec(&many).unwrap(), "more than 1024 members"),
        (&long, "more than 1048576 bytes"),
    ] {
        assert!(
            matches!(tell_text(&hosts[0], text), ControlReply::Refused(said) if said.contains(why)),
            "{why}"
        );
        assert_eq!(asker(&scene, 1, 0).get(&have, "").status, 200);
    }
    let of_authority = Scene::new();
    let other = of_authority.start(&registry, 0, of_authority.order(0, 1, HEDGE));
    assert!(matches!(tell_text(&other, b"[]"), ControlReply::Refused(said) if said.contains("authority")));
}
