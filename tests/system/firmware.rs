//! UEFI firmware (OVMF) boots from a disk: a program as large as a unified kernel image, which its driver reads as one
//! descriptor.
//!
//! Owns the program: it adds up what was loaded of it, says on the console whether that is right, and turns the machine
//! off. Invariant: what it adds up is all of its section, so that a wrong byte is seen.

use crate::world::{MIB, World, succeeds};
use spillway_testkit::{Rng, Server, skip};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Of the data that the program brings along.
const DATA_BYTES: usize = 100 * MIB as usize;
const RIGHT: &str = "SPILLWAY LOADED IT WELL\r\n";
const WRONG: &str = "SPILLWAY LOADED IT WRONG\r\n";

/// In the program's section: the code, the sum, what it says, and the data.
const SUM_AT: usize = 0x80;
const RIGHT_AT: usize = 0x100;
const WRONG_AT: usize = 0x140;
const DATA_AT: usize = 0x200;
/// Where in the code the number of words is.
const COUNT_AT: usize = 0x11;
/// Adds the words of the data up, rotating the sum by 7 bits after each; prints; turns the machine off:
///
/// ```text
///       push rbx; push rsi; sub rsp, 0x28; mov rbx, rdx        # the system table
///       lea rsi, [rip + data]; mov ecx, COUNT; xor eax, eax
///    1: add rax, [rsi]; rol rax, 7; add rsi, 8; dec ecx; jnz 1b
///       lea rdx, [rip + right]; cmp rax, [rip + sum]; je 2f
///       lea rdx, [rip + wrong]
///    2: mov rcx, [rbx + 0x40]; call [rcx + 8]                  # ConOut->OutputString
///       mov rax, [rbx + 0x58]; mov ecx, 2                      # RuntimeServices, EfiResetShutdown
///       xor edx, edx; xor r8d, r8d; xor r9d, r9d; call [rax + 0x68]
/// ```
const CODE: [u8; 88] = [
    0x53, 0x56, 0x48, 0x83, 0xec, 0x28, 0x48, 0x89, 0xd3, 0x48, 0x8d, 0x35, 0xf0, 0x01, 0x00, 0x00, 0xb9, 0,
    0, 0, 0, 0x31, 0xc0, 0x48, 0x03, 0x06, 0x48, 0xc1, 0xc0, 0x07, 0x48, 0x83, 0xc6, 0x08, 0xff, 0xc9, 0x75,
    0xf1, 0x48, 0x8d, 0x15, 0xd3, 0x00, 0x00, 0x00, 0x48, 0x3b, 0x05, 0x4c, 0x00, 0x00, 0x00, 0x74, 0x07,
    0x48, 0x8d, 0x15, 0x03, 0x01, 0x00, 0x00, 0x48, 0x8b, 0x4b, 0x40, 0xff, 0x51, 0x08, 0x48, 0x8b, 0x43,
    0x58, 0xb9, 0x02, 0x00, 0x00, 0x00, 0x31, 0xd2, 0x45, 0x31, 0xc0, 0x45, 0x31, 0xc9, 0xff, 0x50, 0x68,
];

/// The program as a PE32+ file of one section.
fn program() -> Vec<u8> {
    const HEADERS_BYTES: u32 = 0x200;
    const SECTION_AT: u32 = 0x1000;
    let section_bytes = (DATA_AT + DATA_BYTES) as u32;
    let mut file = vec![0u8; HEADERS_BYTES as usize + section_bytes as usize];
    let (headers, section) = file.split_at_mut(HEADERS_BYTES as usize);
    let mut put = |at: usize, bytes: &[u8]| headers[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"MZ");
    put(0x3c, &0x40u32.to_le_bytes());
    put(0x40, b"PE\0\0");
    put(0x44, &0x8664u16.to_le_bytes()); // x86-64
    put(0x46, &1u16.to_le_bytes()); // sections
    put(0x54, &0xf0u16.to_le_bytes()); // bytes of the optional header
    put(0x56, &0x22u16.to_le_bytes()); // executable, for more than 2 GiB
    let optional = 0x58;
    put(optional, &0x20bu16.to_le_bytes()); // PE32+
    for (at, number) in [
        (0x04, section_bytes), // of code
        (0x10, SECTION_AT),    // the entry
        (0x14, SECTION_AT),    // base of code
        (0x20, 0x1000),        // alignment of sections
        (0x24, HEADERS_BYTES), // and in the file
        (0x38, SECTION_AT + section_bytes.next_multiple_of(0x1000)),
        (0x3c, HEADERS_BYTES),
        (0x44, 10), // an EFI application
        (0x6c, 16), // directories, all empty
    ] {
        put(optional + at, &number.to_le_bytes());
    }
    let entry = optional + 0xf0;
    put(entry, b".text");
    for (at, number) in [
        (0x08, section_bytes),
        (0x0c, SECTION_AT),
        (0x10, section_bytes),
        (0x14, HEADERS_BYTES),
        (0x24, 0x6000_0020), // code, to be read and executed
    ] {
        put(entry + at, &number.to_le_bytes());
    }
    let mut rng = Rng::new(40);
    let mut sum = 0u64;
    for word in section[DATA_AT..].chunks_exact_mut(8) {
        let number = rng.next_u64();
        word.copy_from_slice(&number.to_le_bytes());
        sum = sum.wrapping_add(number).rotate_left(7);
    }
    section[..CODE.len()].copy_from_slice(&CODE);
    section[COUNT_AT..COUNT_AT + 4].copy_from_slice(&((DATA_BYTES / 8) as u32).to_le_bytes());
    section[SUM_AT..SUM_AT + 8].copy_from_slice(&sum.to_le_bytes());
    for (at, text) in [(RIGHT_AT, RIGHT), (WRONG_AT, WRONG)] {
        let text: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
        section[at..at + text.len()].copy_from_slice(&text);
    }
    file
}

/// A disk with a partition table and an EFI system partition, in which the program is what firmware starts.
fn image(world: &World) -> PathBuf {
    let (image, file) = (world.blank(160 * MIB), world.path("bootx64.efi"));
    std::fs::write(&file, program()).unwrap();
    let table = world.path("table");
    std::fs::write(
        &table,
        "label: gpt\nstart=2048, size=262144, type=C12A7328-F81F-11D2-BA4B-00A0C93EC93B\n",
    )
    .unwrap();
    succeeds(Command::new("sh").arg("-c").arg(format!("sfdisk -q {} <{}", image.display(), table.display())));
    succeeds(Command::new("mkfs.vfat").args(["-F", "32", "--offset", "2048"]).arg(&image).arg("131072"));
    let partition = format!("{}@@1M", image.display());
    succeeds(Command::new("mmd").args(["-i", &partition, "::/EFI", "::/EFI/BOOT"]));
    succeeds(Command::new("mcopy").args(["-i", &partition]).arg(&file).arg("::/EFI/BOOT/BOOTX64.EFI"));
    image
}

/// Debian's OVMF: code and variables.
fn ovmf() -> Option<[&'static Path; 2]> {
    let files = ["/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd"].map(Path::new);
    files.iter().all(|file| file.is_file()).then_some(files)
}

#[test]
fn uefi_boots_a_program_of_100_mib() {
    let Some(world) = World::new(&["qemu-system-x86_64", "sfdisk", "mkfs.vfat", "mcopy"]) else { return };
    let Some([code, variables]) = ovmf() else {
        return skip("OVMF is not installed: run 'make install-deps'");
    };
    let disk = world.serve(&image(&world), &["--ram", "16M", "--overflow", "64M"]);
    let (own, console) = (world.path("variables.fd"), world.path("console"));
    std::fs::copy(variables, &own).unwrap();
    let line = format!(
        "-machine q35,accel=tcg,memory-backend=memory -m 512M -no-reboot \
         -object memory-backend-memfd,id=memory,size=512M,share=on -nodefaults -no-user-config -display none \
         -serial file:{} -drive if=pflash,format=raw,readonly=on,file={} -drive if=pflash,format=raw,file={} \
         -chardev socket,id=disk,path={} -device vhost-user-blk-pci,chardev=disk,bootindex=0,num-queues=1",
        console.display(),
        code.display(),
        own.display(),
        disk.vhost().display()
    );
    let arguments: Vec<String> = line.split_whitespace().map(String::from).collect();
    let mut qemu =
        Server::start("QEMU", "qemu-system-x86_64", &arguments, None, &world.path("qemu.log")).unwrap();
    let ended = qemu.wait(Duration::from_secs(300));
    let text = String::from_utf8_lossy(&std::fs::read(&console).unwrap()).into_owned();
    assert!(ended.is_ok_and(|status| status.success()), "{text}\n{}\n{}", qemu.tail(), disk.log());
    assert!(text.contains(RIGHT.trim_end()), "{text}");
    disk.stop().unwrap();
}
