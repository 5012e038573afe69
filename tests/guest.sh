#!/usr/bin/env bash
# guest.sh: a real systemd (pid 1, logind, journald, the lingering user manager of a user "spark") for the tests.
#
#   guest.sh [options] start | stop         keep a guest between commands, one per --name
#   guest.sh [options] exec -- CMD [ARG...] run one command in it; several may run at once
#   guest.sh [options] run -- CMD [ARG...]  start, exec, stop
#   guest.sh [options] prepare              only fetch and build what the backend needs (kept)
#
#   -b, --backend ns|tcg  ns:  systemd in fresh namespaces over a copy-on-write overlay of this machine's own / (0.5 s).
#                              It has a cgroup v2 tree; controllers only where the host does not hold them as v1.
#                         tcg: a small VM, QEMU without KVM, with every controller, PSI and real OOM kills. The first use boots it
#                              once (20 s) and keeps a snapshot, from which each later one starts (2 s). It computes 20 times slower.
#   -s, --share DIR       folder of the host, at the same path inside, also the working directory (default: $PWD)
#   -u, --user NAME       who runs the command: spark (default) or root
#   -t, --timeout SEC     for the command (default 600; status 124)
#   -m, --mem MIB         memory of the VM (default 2048)
#   --name NAME           name of the kept guest (default: default). One named SOMETHING-PID is removed by the next start when
#                         process PID is gone, so that a killed test run leaves nothing behind for long
#   -v                    say what takes how long
#
# Inside, $GUEST is the backend, and $GUEST_OUT a folder that everybody may write to: guest-NAME/ctl/out in the cache.
# The cache ($SPARKGUARD_TEST_CACHE, default /var/cache/sparkguard-tests) is readable inside at its own path. There is no
# network but loopback. The command reads this program's stdin. Status 125: the guest did not come up, or died.
#
# systemd must never be started outside a cgroup namespace: it would move every process of the machine into its own scope.
set -euo pipefail
shopt -s inherit_errexit
export PATH=/usr/sbin:/usr/bin:/sbin:/bin:$PATH
umask 022

HERE=$(dirname "$(realpath "$0")")
CACHE=${SPARKGUARD_TEST_CACHE:-/var/cache/sparkguard-tests}
SPARK_UID=6666
BOOT_SECONDS=120
backend=ns share=$PWD mem=2048 cpus=2 limit=600 user=spark name=default verbose=0 verb=
RUN='' PIDS=() VMPID='' KERNEL='' IMAGE='' SNAPSHOT='' QEMU=()

die() {
  echo "guest.sh: $*" >&2
  exit 125
}
say() {
  [ "$verbose" = 0 ] || printf 'guest.sh: [%6.2f s] %s\n' "$(awk "BEGIN { print $EPOCHREALTIME - $T0 }")" "$*" >&2
}
# A wait between two looks at a file: virtiofs carries no events from one side to the other.
pause() {
  read -r -t "$1" -u "$PAUSE" || true
}

# ---- what the guest runs

# Units of the host that make no sense in a guest, or cost time at its start.
MASKED="systemd-udevd.service systemd-udev-trigger.service systemd-udevd-kernel.socket systemd-udevd-control.socket
  systemd-udevd-varlink.socket systemd-sysusers.service systemd-random-seed.service systemd-update-utmp.service
  systemd-hwdb-update.service systemd-journal-catalog-update.service ldconfig.service systemd-binfmt.service
  proc-sys-fs-binfmt_misc.automount systemd-sysctl.service systemd-modules-load.service systemd-remount-fs.service
  systemd-tmpfiles-setup-dev.service systemd-tmpfiles-setup-dev-early.service modprobe@.service dev-hugepages.mount
  dev-mqueue.mount sys-kernel-debug.mount sys-kernel-tracing.mount sys-kernel-config.mount sys-fs-fuse-connections.mount
  kmod-static-nodes.service systemd-firstboot.service systemd-pcrphase.service systemd-pcrphase-sysinit.service
  systemd-pcrmachine.service systemd-tpm2-setup.service systemd-tpm2-setup-early.service systemd-ask-password-console.path
  systemd-ask-password-wall.path systemd-tmpfiles-clean.timer systemd-resolved.service systemd-networkd.service
  systemd-timesyncd.service run-lock.mount tmp.mount"

skeleton() { # LOWER DEST: DEST/root goes over the root that LOWER is; DEST/system is all of /etc/systemd/system
  local lower=$1 root=$2/root system=$2/system file unit
  rm -rf "$2"
  mkdir -p "$root"/{etc,var/lib/systemd/linger,home/spark,mnt/ctl,usr/lib/guest} "$system/user@.service.d"
  for file in passwd group shadow; do
    sed "/^spark:/d; /^[^:]*:[^:]*:$SPARK_UID:/d" "$lower/etc/$file" >"$root/etc/$file"
  done
  echo "spark:x:$SPARK_UID:$SPARK_UID::/home/spark:/bin/bash" >>"$root/etc/passwd"
  echo "spark:x:$SPARK_UID:" >>"$root/etc/group"
  echo 'spark:*:19000:0:99999:7:::' >>"$root/etc/shadow"
  chmod 600 "$root/etc/shadow"
  chown "$SPARK_UID:$SPARK_UID" "$root/home/spark"
  : >"$root/var/lib/systemd/linger/spark"
  : >"$root/etc/machine-id"
  : >"$root/etc/fstab"
  echo guest >"$root/etc/hostname"
  echo '127.0.0.1 localhost guest' >"$root/etc/hosts"
  # systemd 252 delegates memory, pids and cpu to a user manager; later ones more. The same everywhere:
  printf '[Service]\nDelegate=cpu cpuset io memory pids\n' >"$system/user@.service.d/delegate.conf"
  cat >"$system/guest.target" <<U
[Unit]
Requires=basic.target user@$SPARK_UID.service systemd-logind.service
Wants=guest.service dbus.service systemd-user-sessions.service
After=basic.target
U
  cat >"$system/guest.service" <<U
[Unit]
After=user@$SPARK_UID.service systemd-user-sessions.service
[Service]
Type=exec
StandardInput=null
TimeoutStopSec=5
ExecStart=/bin/bash /usr/lib/guest/agent
U
  ln -s guest.target "$system/default.target"
  for unit in $MASKED; do ln -s /dev/null "$system/$unit"; done
  agent >"$root/usr/lib/guest/agent"
}

agent() { # prints the program that runs as root in the guest: it mounts the folders (in the VM) and runs what "exec" leaves there
  cat <<'A'
kind=ns
for word in $(cat /proc/cmdline); do case $word in guest=*) kind=${word#guest=} ;; esac; done
mkdir -p /mnt/ctl
mkfifo /run/guest.pause
exec 9<>/run/guest.pause
pause() { read -r -t "$1" -u 9 || :; }
if [ "$kind" = tcg ]; then
  perl -e 'for (@ARGV) { open(my $f, "<", "/usr/lib/guest/modules/$_.ko") or next; syscall(313, fileno($f), my $e = "", 0) == 0 or print "insmod $_: $!\n" }' fuse virtiofs
  sync
  echo GUEST-READY >/dev/ttyS0 # the snapshot is taken here; the folders are plugged in later
  until mount -t virtiofs ctl /mnt/ctl 2>/dev/null; do pause 0.1; done
  read -r now </mnt/ctl/now
  date -s "@$now" >/dev/null
fi
share=$(cat /mnt/ctl/share)
cache=$(cat /mnt/ctl/cache)
if [ "$kind" = tcg ]; then
  mkdir -p "$cache" "$share"
  until mount -t virtiofs -o ro cache "$cache" 2>/dev/null; do pause 0.1; done
  until mount -t virtiofs share "$share" 2>/dev/null; do pause 0.1; done
fi
# A checkout in somebody's private home is within reach, in here.
for dir in "$share" "$cache"; do
  while [ "$dir" != / ]; do
    dir=$(dirname "$dir")
    chmod o+x "$dir"
  done
done
run() { # JOB
  local user limit env
  read -r user limit <"$1/for"
  env="LANG=C.UTF-8 GUEST=$kind GUEST_OUT=/mnt/ctl/out"
  if [ "$user" = root ]; then
    env -C "$share" -S "$env" HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
      timeout -k 5 "$limit" bash "$1/cmd"
  else
    setsid -w setpriv --reuid="$user" --regid="$user" --init-groups --inh-caps=-all env -i -C "$share" -S "$env" \
      HOME="/home/$user" USER="$user" LOGNAME="$user" SHELL=/bin/bash PATH=/usr/local/bin:/usr/bin:/bin \
      XDG_RUNTIME_DIR="/run/user/$(id -u "$user")" DBUS_SESSION_BUS_ADDRESS="unix:path=/run/user/$(id -u "$user")/bus" \
      timeout -k 5 "$limit" bash "$1/cmd"
  fi <"$1/in" >"$1/out" 2>"$1/err"
  echo $? >"$1/status.new"
  [ "$kind" = ns ] || sync
  mv "$1/status.new" "$1/status"
}
cat /proc/uptime >/mnt/ctl/up.new
mv /mnt/ctl/up.new /mnt/ctl/up
shopt -s nullglob
while [ ! -e /mnt/ctl/stop ]; do
  for go in /mnt/ctl/job.*/go; do
    rm "$go"
    run "${go%/go}" &
  done
  if [ "$kind" = ns ]; then pause 0.02; else pause 0.1; fi
done
sync
exec systemctl poweroff --force --force --no-wall
A
}

# ---- the VM's parts: a kernel, an image with this machine's own packages, a snapshot

IMAGE_PKGS="dash systemd dbus dbus-daemon dbus-user-session libpam-systemd python3 python3-venv bash coreutils util-linux bsdutils
  mount procps login passwd grep sed mawk findutils tar gzip diffutils hostname perl-base libc-bin curl"

fetch_deb() { # PACKAGE DEST: downloads a package and unpacks it over DEST, without installing it
  local dir
  dir=$(mktemp -d "$CACHE/deb.XXXX")
  (cd "$dir" && apt-get -qq -o APT::Sandbox::User=root download "$1" >&2) || return
  dpkg-deb -x "$dir"/*.deb "$2"
  rm -rf "$dir"
}

depends_on() { # PACKAGE PREFIX: the first package that it depends on whose name starts so
  apt-cache depends "$1" 2>/dev/null | awk -v prefix="$2" '/Depends:/ && index($2, prefix) == 1 { print $2; exit }'
}

fetch_kernel() { # DEST
  local image modules
  # Debian's kernel for clouds is the small one; Ubuntu's generic one has its modules in a package of their own.
  image=$(depends_on linux-image-cloud-amd64 linux-image-)
  [ -n "$image" ] || image=$(depends_on linux-image-virtual linux-image-)
  [ -n "$image" ] || return
  modules=$(depends_on "$image" linux-modules-)
  rm -rf "$1"
  mkdir -p "$1"
  fetch_deb "$image" "$1" && { [ -z "$modules" ] || fetch_deb "$modules" "$1"; }
}

kernel() { # sets KERNEL; the modules lie beside it
  KERNEL=$(compgen -G "$CACHE/kernel/boot/vmlinuz-*" | tail -n 1) || true
  [ -z "$KERNEL" ] || return 0
  local new=$CACHE/kernel.new
  # Package lists that are missing or old name no kernel, or one that is gone.
  fetch_kernel "$new" || { apt-get -qq update >&2 && fetch_kernel "$new"; } || die "apt-get offers no kernel"
  find "$new" -type f ! -name 'vmlinuz-*' ! -name 'virtio*.ko*' ! -name 'fuse.ko*' -delete
  find "$new" -type d -empty -delete
  rm -rf "$CACHE/kernel"
  mv "$new" "$CACHE/kernel"
  KERNEL=$(compgen -G "$CACHE/kernel/boot/vmlinuz-*" | tail -n 1)
  say "kernel ${KERNEL##*/}"
}

module() { # NAME DEST: unpacks a kernel module, if the kernel does not have it built in
  local file
  file=$(find "$CACHE/kernel" -name "$1.ko*" | head -n 1)
  case $file in
    *.xz) xz -dc "$file" >"$2" ;;
    *.zst) zstd -qdc "$file" >"$2" ;;
    ?*) cp "$file" "$2" ;;
  esac
}

image() { # sets IMAGE
  local key tree skel link name
  key=$({
    dpkg-query -W systemd dbus libc6 python3
    echo "$IMAGE_PKGS $MASKED ${KERNEL##*/}"
    declare -f skeleton agent image
    cat "$HERE/tools/package_tree.py"
  } | sha256sum | cut -c1-12)
  IMAGE=$CACHE/image-$key.ext4
  [ ! -e "$IMAGE" ] || return 0
  tree=$(mktemp -d "$CACHE/tree.XXXX")
  chmod 755 "$tree"
  # shellcheck disable=SC2086 # a list of packages
  /usr/bin/python3 "$HERE/tools/package_tree.py" "$tree" $IMAGE_PKGS
  mkdir -p "$tree"/{proc,sys,dev,run,tmp,root,home,var/log/journal,var/tmp,etc/systemd,usr/lib/guest/modules}
  chmod 1777 "$tree/tmp" "$tree/var/tmp"
  for link in var/run:/run var/lock:/run/lock etc/mtab:/proc/mounts; do ln -sfn "${link#*:}" "$tree/${link%%:*}"; done
  skel=$tree.skeleton
  skeleton "$tree" "$skel"
  cp -a "$skel/root/." "$tree/"
  rm -rf "$tree/etc/systemd/system" "$tree/etc/systemd/user"
  mv "$skel/system" "$tree/etc/systemd/system"
  mkdir "$tree/etc/systemd/user"
  for name in fuse virtiofs; do module $name "$tree/usr/lib/guest/modules/$name.ko"; done
  mke2fs -q -t ext4 -O ^has_journal -m 0 -d "$tree" "$IMAGE.new" 2G >&2
  rm -rf "$tree" "$skel"
  find "$CACHE" -maxdepth 1 -name 'image-*.ext4*' ! -name '*.new' -delete
  mv "$IMAGE.new" "$IMAGE"
  say "image of $(du -m "$IMAGE" | cut -f1) MB built"
}

initrd() { # OUT: loads the disk's modules, mounts it and runs systemd there
  local dir bin lib name
  dir=$(mktemp -d "$CACHE/initrd.XXXX")
  mkdir -p "$dir"/{bin,dev,proc,root,modules}
  for bin in dash mount perl chroot; do
    bin=$(readlink -f "$(command -v $bin)")
    cp "$bin" "$dir/bin/"
    while read -r lib; do
      mkdir -p "$dir/$(dirname "$lib")"
      cp -L "$lib" "$dir/$lib"
    done < <(ldd "$bin" | grep -o '/[^ :]*')
  done
  local wanted="virtio_ring virtio virtio_pci_legacy_dev virtio_pci_modern_dev virtio_pci virtio_blk"
  for name in $wanted; do module "$name" "$dir/modules/$name.ko"; done
  cat >"$dir/init" <<I
#!/bin/dash
export PATH=/bin
mount -n -t devtmpfs devtmpfs /dev
mount -n -t proc proc /proc
perl -e 'for (@ARGV) { open(my \$f, "<", "/modules/\$_.ko") or next; syscall(313, fileno(\$f), my \$e = "", 0) == 0 or print "insmod \$_: \$!\n" }' $wanted
mount -n -t ext4 /dev/vda /root
cd /root
mount -n --move /dev dev
mount -n --move . /
exec chroot . /lib/systemd/systemd
I
  chmod 755 "$dir/init"
  /usr/bin/python3 "$HERE/tools/cpio.py" "$dir" >"$1"
  rm -rf "$dir"
}

monitor() { # SOCKET COMMAND...: QEMU's monitor
  /usr/bin/python3 "$HERE/tools/qemu_monitor.py" "$@"
}

qemu() { # RAM DISK SNAPSHOT=on|off CONSOLE MONITOR: sets QEMU, the command line
  # Never KVM: on some machines /dev/kvm opens and then hangs. No AVX: emulating it takes longer than doing without.
  # shellcheck disable=SC2054 # the commas are QEMU's
  QEMU=(qemu-system-x86_64 -accel tcg,thread=multi,tb-size=256 -cpu max,-avx,-avx2 -smp "$cpus" -m "${mem}M"
    -M pc,memory-backend=mem -object "memory-backend-file,id=mem,size=${mem}M,share=on,mem-path=$1"
    -nodefaults -no-user-config -display none -no-reboot -kernel "$KERNEL" -initrd "$CACHE/initrd.cpio"
    -append "console=ttyS0 panic=-1 quiet loglevel=4 psi=1 mitigations=off random.trust_cpu=on systemd.show_status=0 guest=tcg"
    -drive "if=none,id=root,file=$2,format=raw,snapshot=$3,cache=unsafe" -device virtio-blk-pci,drive=root
    -serial "file:$4" -monitor "unix:$5,server,nowait")
}

snapshot() { # sets SNAPSHOT: boots once, and keeps disk, memory and devices of the guest when it is up
  local key pid
  key=$({
    qemu-system-x86_64 --version
    echo "$IMAGE $KERNEL $mem $cpus"
    declare -f qemu initrd snapshot
  } | sha256sum | cut -c1-12)
  SNAPSHOT=$CACHE/snapshot-$mem-$key
  [ ! -e "$SNAPSHOT/state" ] || return 0
  find "$CACHE" -maxdepth 1 -name "snapshot-$mem-*" -exec rm -rf {} +
  mkdir -p "$SNAPSHOT"
  initrd "$CACHE/initrd.cpio"
  cp --sparse=always "$IMAGE" "$SNAPSHOT/disk"
  qemu "$SNAPSHOT/ram" "$SNAPSHOT/disk" off "$SNAPSHOT/console" "$SNAPSHOT/monitor"
  "${QEMU[@]}" </dev/null >"$SNAPSHOT/vmm.log" 2>&1 8>&- &
  pid=$!
  # Half a second for the manager to finish what it does after it started the agent.
  if until_ready "$SNAPSHOT/console" $pid && pause 0.5 && monitor "$SNAPSHOT/monitor" stop \
    'migrate_set_capability x-ignore-shared on' "migrate \"exec:cat > $SNAPSHOT/state.new\"" quit; then
    wait $pid || true
    mv "$SNAPSHOT/state.new" "$SNAPSHOT/state"
    say "snapshot of $(du -cm "$SNAPSHOT"/* | tail -n 1 | cut -f1) MB taken"
  else
    kill $pid 2>/dev/null || true
    cat "$SNAPSHOT/vmm.log" >&2
    rm -rf "$SNAPSHOT"
    die "the VM did not boot"
  fi
}

until_ready() { # CONSOLE PID
  local i
  for ((i = 0; i < BOOT_SECONDS * 20; i++)); do
    if grep -qa GUEST-READY "$1" 2>/dev/null; then return 0; fi
    kill -0 "$2" 2>/dev/null || break
    pause 0.05
  done
  tail -n 25 "$1" >&2
  return 1
}

prepare() {
  local file
  exec 8>"$CACHE/guest.lock"
  flock 8
  case $backend in
    ns)
      for file in /lib/systemd/systemd /lib/systemd/systemd-logind /usr/bin/dbus-daemon /usr/lib/systemd/user/dbus.socket; do
        [ -e $file ] || die "$file is missing: apt-get install systemd dbus dbus-user-session libpam-systemd"
      done
      compgen -G '/usr/lib/*/security/pam_systemd.so' >/dev/null || die "pam_systemd is missing: apt-get install libpam-systemd"
      ;;
    tcg)
      [ "$(uname -m)" = x86_64 ] || die "the VM is for x86_64 only"
      command -v qemu-system-x86_64 >/dev/null || die "qemu is missing: apt-get install qemu-system-x86"
      [ -x /usr/lib/qemu/virtiofsd ] || [ -x /usr/libexec/virtiofsd ] || die "virtiofsd is missing: apt-get install virtiofsd"
      kernel
      image
      snapshot
      ;;
    *) die "no backend $backend" ;;
  esac
  exec 8>&-
  say prepared
}

# ---- one guest

remove_forsaken() { # guests NAME-PID whose process is gone
  local dir pid
  for dir in "$CACHE"/guest-*-*; do
    pid=${dir##*-}
    if [[ -d $dir && $pid =~ ^[0-9]+$ && ! -d /proc/$pid ]]; then "$0" --name "${dir##*/guest-}" stop; fi
  done
}

boot() { # starts the guest in RUN; its first process is VMPID
  local i
  [ ! -e "$RUN" ] || die "there is a guest $name already"
  mkdir -p "$RUN/ctl/out"
  chmod 1777 "$RUN/ctl/out"
  echo "$share" >"$RUN/ctl/share"
  echo "$CACHE" >"$RUN/ctl/cache"
  "boot_$backend"
  echo "${PIDS[*]}" >"$RUN/pids"
  echo "$VMPID" >"$RUN/main"
  for ((i = 0; i < BOOT_SECONDS * 50; i++)); do
    if [ -e "$RUN/ctl/up" ]; then
      say "guest up"
      return
    fi
    alive || break
    pause 0.02
  done
  dump
  die "the guest did not come up"
}

boot_ns() {
  skeleton / "$RUN/skeleton"
  mkdir -p "$RUN"/{up,cgroup}
  ns_init >"$RUN/init"
  export RUN share CACHE
  # A cgroup of its own first: systemd takes the root of its cgroup namespace for the machine's.
  # shellcheck disable=SC2016 # the inner shell expands it
  setsid unshare --mount bash -c '
    mount -t cgroup2 cgroup2 $RUN/cgroup
    mine=$RUN/cgroup/guest-$$
    mkdir $mine
    echo $$ >$mine/cgroup.procs
    unshare --mount --cgroup --pid --ipc --uts --net --fork --kill-child bash $RUN/init &
    echo $! >$RUN/inner
    wait $!
    echo $$ >$RUN/cgroup/cgroup.procs
    for i in 1 2 3 4 5 6 7 8 9 10; do
      find $mine -depth -type d -exec rmdir {} + 2>/dev/null && break
      sleep 0.1
    done' </dev/null >"$RUN/console" 2>&1 &
  VMPID=$!
  PIDS+=("$VMPID")
}

ns_init() { # prints the program that makes the guest's root and becomes its systemd
  cat <<'I'
set -e
root=$RUN/up/root
mount -t tmpfs -o mode=755 tmpfs "$RUN/up"
mkdir "$RUN"/up/{upper,work,root}
cp -a "$RUN/skeleton/root/." "$RUN/up/upper/"
mount -t overlay overlay -o "lowerdir=/,upperdir=$RUN/up/upper,workdir=$RUN/up/work" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for node in null zero full random urandom tty; do
  touch "$root/dev/$node"
  mount --bind "/dev/$node" "$root/dev/$node"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=666,gid=5,mode=620 devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
for i in 0:stdin 1:stdout 2:stderr; do ln -s "fd/${i%:*}" "$root/dev/${i#*:}"; done
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mkdir -p "$root/var/log/journal" "$root$share" "$root$CACHE"
mount --bind "$RUN/ctl" "$root/mnt/ctl"
# The cache and the share may be file systems of their own, which an overlay of / does not show.
mount --bind "$CACHE" "$root$CACHE"
mount -o remount,bind,ro "$root$CACHE"
mount --bind "$share" "$root$share"
mount -t tmpfs -o mode=755 tmpfs "$root/etc/systemd/system"
cp -a "$RUN/skeleton/system/." "$root/etc/systemd/system/"
mount -t tmpfs -o mode=755 tmpfs "$root/etc/systemd/user"
cd "$root"
mkdir -p .old
pivot_root . .old
exec chroot . /bin/bash -c 'umount -l /.old
exec env -i container=guest PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 TERM=dumb /lib/systemd/systemd --log-target=null --show-status=0'
I
}

boot_tcg() {
  local daemon=/usr/lib/qemu/virtiofsd tag dir keep i ram=$RUN/ram plugs=()
  [ -x $daemon ] || daemon=/usr/libexec/virtiofsd
  for tag in ctl:"$RUN/ctl" cache:"$CACHE" share:"$share"; do
    dir=${tag#*:} tag=${tag%%:*} keep=1
    [ "$tag" != ctl ] || keep=0 # both sides write to it
    if [ $daemon = /usr/lib/qemu/virtiofsd ]; then # the old one, in C, with options of its own
      set -- -o "source=$dir" -o sandbox=chroot -o "cache=$([ $keep = 1 ] && echo auto || echo none)" --thread-pool-size=0
    else
      set -- --shared-dir "$dir" --sandbox chroot --cache="$([ $keep = 1 ] && echo auto || echo never)" --thread-pool-size 0
    fi
    setsid $daemon --socket-path="$RUN/$tag.sock" "$@" >"$RUN/$tag.log" 2>&1 </dev/null &
    PIDS+=($!)
    plugs+=("chardev-add socket,id=$tag,path=$RUN/$tag.sock" "device_add vhost-user-fs-pci,chardev=$tag,tag=$tag")
  done
  # The guest's memory lies in RAM if there is room for it, or else each page it touches goes to the disk.
  if [ "$(df --output=avail -m /dev/shm 2>/dev/null | tail -n 1)" -gt $((mem * 5 / 4)) ] 2>/dev/null; then
    ram=$(mktemp -u /dev/shm/sparkguard-guest.XXXXXX)
  fi
  echo "$ram" >"$RUN/ramfile"
  cp --sparse=always "$SNAPSHOT/ram" "$ram"
  qemu "$ram" "$SNAPSHOT/disk" on "$RUN/console" "$RUN/monitor"
  setsid "${QEMU[@]}" -incoming defer </dev/null >"$RUN/vmm.log" 2>&1 &
  VMPID=$!
  PIDS+=("$VMPID")
  echo "${PIDS[*]}" >"$RUN/pids"
  echo "$VMPID" >"$RUN/main"
  for ((i = 0; i < 500; i++)); do
    [ ! -S "$RUN/ctl.sock" ] || [ ! -S "$RUN/cache.sock" ] || [ ! -S "$RUN/share.sock" ] || break
    pause 0.02
  done
  date +%s.%N >"$RUN/ctl/now"
  monitor "$RUN/monitor" 'migrate_set_capability x-ignore-shared on' "migrate_incoming \"exec:cat $SNAPSHOT/state\"" \
    @WAIT cont "${plugs[@]}" || {
    dump
    die "the VM did not come up"
  }
}

alive() { # a zombie is not alive
  local pid=
  read -r pid <"$RUN/main" && grep -q '^State:.[^ZX]' "/proc/$pid/status"
} 2>/dev/null

dump() {
  {
    echo "--- console of the guest"
    tail -n 25 "$RUN/console"
    cat "$RUN"/*.log
  } >&2 2>/dev/null || true
}

run_command() { # CMD...: a single word is a script
  local job status=125
  job=$(mktemp -d "$RUN/ctl/job.XXXXXX")
  chmod 755 "$job"
  if [ $# = 1 ]; then printf '%s\n' "$1"; else printf '%q ' "$@"; fi >"$job/cmd"
  cat >"$job/in"
  : >"$job/out"
  : >"$job/err"
  echo "$user $limit" >"$job/for"
  : >"$job/go"
  until [ -e "$job/status" ]; do
    if ! alive; then
      dump
      die "the guest died"
    fi
    pause 0.02
  done
  cat "$job/out"
  cat "$job/err" >&2
  status=$(cat "$job/status")
  rm -rf "$job"
  say "status $status"
  return "$status"
}

shut_down() {
  local pid i
  [ -n "$RUN" ] && [ -d "$RUN" ] || return 0
  touch "$RUN/ctl/stop"
  # Ends the namespaces' init, and with it all that is inside; the wrapper then removes the cgroup.
  [ ! -e "$RUN/inner" ] || kill -9 "$(cat "$RUN/inner")" 2>/dev/null || true
  if [ -e "$RUN/pids" ]; then
    read -ra PIDS <"$RUN/pids"
    for pid in "${PIDS[@]}"; do
      [ -e "$RUN/inner" ] || kill "$pid" 2>/dev/null || true
    done
    for ((i = 0; i < 100; i++)); do
      alive || break
      pause 0.02
    done
    for pid in "${PIDS[@]}"; do kill -9 "$pid" 2>/dev/null || true; done
  fi
  [ ! -e "$RUN/ramfile" ] || rm -f "$(cat "$RUN/ramfile")"
  rm -rf "$RUN"
  say "guest gone"
}

main() {
  while [ $# -gt 0 ]; do
    case $1 in
      -b | --backend) backend=$2 && shift ;;
      -s | --share) share=$(realpath "$2") && shift ;;
      -u | --user) user=$2 && shift ;;
      -t | --timeout) limit=$2 && shift ;;
      -m | --mem) mem=$2 && shift ;;
      --name) name=$2 && shift ;;
      -v) verbose=1 ;;
      -h | --help) sed -n '2,/^set -e/p' "$0" | sed '$d; s/^# \{0,1\}//' && exit ;;
      start | stop | exec | run | prepare) verb=$1 ;;
      --) shift && break ;;
      *) die "unknown argument $1 (-h shows the manual)" ;;
    esac
    shift
  done
  [ "$(id -u)" = 0 ] || die "needs root"
  T0=$EPOCHREALTIME
  mkdir -p "$CACHE"
  local fifo
  fifo=$(mktemp -u)
  mkfifo "$fifo"
  exec {PAUSE}<>"$fifo"
  rm "$fifo"
  RUN=$CACHE/guest-$name
  case $verb in
    prepare) prepare ;;
    start)
      remove_forsaken
      prepare
      trap shut_down EXIT
      boot
      trap - EXIT
      ;;
    exec)
      [ -e "$RUN/main" ] || die "there is no guest $name: start it first"
      run_command "$@"
      ;;
    stop) shut_down ;;
    run)
      [ $# -gt 0 ] || die "no command"
      name=run-$$
      RUN=$CACHE/guest-$name
      remove_forsaken
      prepare
      trap shut_down EXIT
      trap 'exit 130' INT TERM
      boot
      run_command "$@"
      ;;
    *) die "say start, exec, stop, run or prepare" ;;
  esac
}

main "$@"
