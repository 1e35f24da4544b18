#!/bin/sh
# Turns a process in namespaces of its own into a host, then becomes its sshd, or just waits.
# Every mount below is seen by this host alone and vanishes with its last process.
# Arguments: the host's name, the cluster's directory, sshd or none, then the directories that must
# stay visible although they may lie under /tmp.
set -eu
name=$1 common=$2 server=$3
shift 3
hostname "$name"
ip link set lo up

mount --rbind /tmp /mnt
mount -t tmpfs tmpfs /tmp
chmod 1777 /tmp
for directory in "$@"; do
    case $directory in
        /tmp/*) mkdir -p "$directory"; mount --rbind "/mnt/${directory#/tmp/}" "$directory" ;;
    esac
done
umount -l /mnt
mount -t tmpfs tmpfs /run       # pid files, and the directory sshd asks for
mkdir -m 755 /run/sshd
mount -t tmpfs tmpfs /dev/shm   # hosts share no memory
chmod 1777 /dev/shm

mount --bind "$common/hosts" /etc/hosts
mount --bind "$common/ssh_config" /etc/ssh/ssh_config
mount --bind "$common/shadow" /etc/shadow
# What the user of this machine configured for shells and ssh is not for the test:
# a .bashrc that puts another python first would reach every remote rank.
for file in "$HOME/.bashrc" "$HOME/.ssh/config"; do
    if [ -e "$file" ]; then mount --bind "$common/empty" "$file"; fi
done
[ "$server" = sshd ] || exec sleep infinity
exec "$(command -v sshd)" -D -e -f "$common/$name/sshd_config"
