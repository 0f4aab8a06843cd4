# The work of one demo run, inside the guest: what a user's first minutes look like to a disk, as in seed 000.
# Reports JSON lines on its standard output, the machine's console. Every step checks what it did. The machine stays on: its
# disk's figures are read while it is there.
set -eu
copy_bytes=$((256 << 20))
home=/home/user
share=/srv/copied
now() { cut -d' ' -f1 /proc/uptime; }
io() { awk '$3 == "vda" { printf "{\"reads\":%s,\"read_sectors\":%s,\"writes\":%s,\"written_sectors\":%s,\"discards\":%s}", $4, $6, $8, $10, $15 }' /proc/diskstats; }
cpu() { awk '$1 == "cpu" { printf "{\"busy\":%d,\"iowait\":%d}", $2 + $3 + $4 + $7 + $8, $6 }' /proc/stat; }
step() { printf '{"step":"%s","uptime":%s,"io":%s,"cpu":%s}\n' "$1" "$(now)" "$(io)" "$(cpu)"; }
die() {
    printf '{"error":"%s"}\n' "$1"
    systemctl poweroff --force --force
    exit 1
}
trap 'die "the work script stopped early"' EXIT

step boot

# Logon: a first-time profile, some 5 MB of small files, written and then opened once.
mkdir -p $home $share
cd /
find /usr/share /etc /var/lib/dpkg -xdev -type f -size -16k -size +0 -printf '%s %p\n' | sort -k2 >/run/small
awk 'NR % 2 { if (sum >= 5 * 1024 * 1024) next; sum += $1; print $2 }' /run/small >/run/profile
tar -cf - -T /run/profile 2>/dev/null | tar -xf - -C $home
find $home -type f -exec cat {} + >/dev/null
sync
step logon

# 256 MB of files copied from the golden image.
find /usr /boot -xdev -type f -size +64k -printf '%s %p\n' | sort -k2 >/run/large
awk -v limit=$copy_bytes '{ if (sum >= limit) next; sum += $1; print $2 }' /run/large >/run/copied
tar -cf - -T /run/copied 2>/dev/null | tar -xf - -C $share
sync
[ "$(du -sb $share | cut -f1)" -ge $((copy_bytes * 9 / 10)) ] || die "the golden image holds less than 256 MB to copy"
step copy

# Documents that are open are saved again and again.
mkdir $home/documents
n=0
while [ $n -lt 8 ]; do
    for d in 1 2 3 4 5; do
        dd if=/usr/lib/x86_64-linux-gnu/libcrypto.so.3 of=$home/documents/$d bs=64k count=16 skip=$n conv=notrunc 2>/dev/null
    done
    sync
    n=$((n + 1))
done
step save

# Some of it is read again, past the guest's own page cache, and compared with where it came from.
echo 3 >/proc/sys/vm/drop_caches
awk 'NR % 4 == 1' /run/copied >/run/again
while read -r f; do cmp -s "$f" "$share$f" || die "$f differs from its copy"; done </run/again
step read

# Thrown away, and given back.
rm -r $share
sync
fstrim /
sync
step trim

trap - EXIT
echo '{"done":true}'
